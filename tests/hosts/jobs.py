"""Elastic jobs on hosts in a box: an agent on each host, one worker each unless told otherwise, one store.

Owns where the store is (``c10d`` and ``static``: the agent of ``host0``; ``etcd``: a member on each of some hosts;
``file``: the disk that all hosts share) and what a job promises after a fault: who committed what, and when.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.elastic.cluster import Cluster, Node
from tests.hosts.box import Box, Host

from log_lines import read_lines
from phalanx.launch.rendezvous._etcd_process import find_program

SCRIPT = Path(__file__).parent / "host_script.py"
LEASE = 15.0
"""The default. A shorter one would be a fault of its own on a machine that has other things to do."""
GROUP_TIMEOUT = 3.0
"""How long a collective of the jobs here waits for a peer that lives and does not come."""


class HostJob(Cluster):
    """A job on the hosts of a box; everything that it writes is in a directory that all of them see."""

    def __init__(
        self,
        directory: Path,
        box: Box,
        *,
        num_steps: int,
        nodes: str,
        store: str,
        backend: str = "c10d",
        hosts: Sequence[Host] = (),
        per_host: int = 1,
        lease: float = LEASE,
        hold: int | None = None,
        script_flag: str = "",
        settings: Mapping[str, str] | None = None,
        **options: str,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.box = box
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(16))
        secret.chmod(0o600)
        networks = directory / "networks"
        networks.mkdir()
        for host in box.hosts:
            (networks / host.name).write_text(host.workers.path)
        told = {
            "lease": f"{lease:g}",
            "secret_file": str(secret),
            "join_timeout": "200",
            "last_call_timeout": "60",
        } | dict(settings or {})
        self._of_job = (
            f"--nnodes={nodes}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={store}",
            "--rdzv-id=hosts",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in told.items())}",
        )
        is_split = any(len(host.places) > 1 for host in box.hosts)
        where = f" --netns={networks}" if is_split else ""
        self.agent_of: dict[str, subprocess.Popen[bytes]] = {}
        chosen = list(hosts or box.hosts)
        super().__init__(
            directory, per_host, num_steps, 0.01, hold=hold, script=SCRIPT, nodes=[self.node_on(h) for h in chosen],
            script_flag=f"--timeout={GROUP_TIMEOUT:g} {script_flag}{where}", max_restarts="1000", **options,
        )  # fmt: skip
        self.agent_of = {host.name: agent for host, agent in zip(chosen, self.agents, strict=True)}

    def node_on(self, host: Host) -> Node:
        return Node(prefix=tuple(host.inside()), flags=(*self._of_job, f"--local-addr={host.address}"))

    def start_on(self, host: Host) -> None:
        """Start an agent on a host that has none, or whose agent has ended."""
        self.add(self.node_on(host))
        self.agent_of[host.name] = self.agents[-1]

    def forget(self, host: Host) -> int:
        """Take the agent of a host off the list of those that must end well; how it ended."""
        agent = self.agent_of.pop(host.name)
        code = agent.wait(120)
        self.agents.remove(agent)
        if agent is self.process and self.agents:
            self.process = self.agents[0]
        return code

    # -- what was promised ------------------------------------------------------------------------------------

    def commits(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """For each step, who says that it is committed, and as the result of which attempts."""
        found: dict[int, dict[str, tuple[int, ...]]] = {}
        for path in sorted((self.directory / "logs").glob("audit-*.jsonl")):
            for record in read_lines(path):
                if record["kind"] == "commit":
                    found.setdefault(record["step"], {})[path.name] = tuple(record["lineage"])
        return found

    def committed_twice(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Steps that were committed as results of different attempts: two halves that both went on.

        Two halves that have a store each may count their attempts alike: then two lists of workers have one name.
        """
        members: dict[tuple[int, int], set[tuple[str, ...]]] = {}
        for record in self.events("regrouped"):
            members.setdefault((record["generation"], record["round"]), set()).add(tuple(sorted(record["workers"])))
        halves = {name: lists for name, lists in members.items() if len(lists) > 1}
        assert not halves, f"(generation, round) of two groups at once: {halves}"
        return {step: told for step, told in self.commits().items() if len(set(told.values())) > 1}

    def is_level(self) -> bool:
        """Whether every worker of the newest round sits in it, by its own word."""
        rounds = self.events("regrouped")
        newest = max((record["generation"], record["round"]) for record in rounds)
        return {r["worker"] for r in rounds if (r["generation"], r["round"]) == newest} == set(self.newest_round())

    def next_commit(self, timeout: float = 150.0) -> float:
        """Let one more step be committed; the seconds until it was."""
        begun, step = time.monotonic(), self.step()
        self.hold(step + 1)
        self.wait_until(lambda: self.step() > step, f"a step after {step}", timeout)
        return time.monotonic() - begun


@contextmanager
def etcd_on(hosts: Sequence[Host], directory: Path) -> Iterator[str]:
    """An etcd with a member on each of the hosts; what ``--rdzv-endpoint`` takes."""
    from tests.comm.stores.conftest import etcd_program

    cluster = ",".join(f"{host.name}=http://{host.address}:2380" for host in hosts)
    members = []
    for host in hosts:
        options = {
            "name": host.name,
            "data-dir": str(directory / host.name),
            "listen-client-urls": f"http://{host.address}:2379",
            "advertise-client-urls": f"http://{host.address}:2379",
            "listen-peer-urls": f"http://{host.address}:2380",
            "initial-advertise-peer-urls": f"http://{host.address}:2380",
            "initial-cluster": cluster,
            "log-level": "panic",
        }
        words = [etcd_program(), "--unsafe-no-fsync", *(f"--{key}={value}" for key, value in options.items())]
        members.append(subprocess.Popen(host.inside(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        yield ",".join(f"{host.address}:2379" for host in hosts)
    finally:
        for member in members:
            member.kill()
            member.wait(60)


class OwnEtcd:
    """Looks at the etcd that the agents of a job run among themselves, from one of its hosts, with etcd's own tool."""

    def __init__(self, job: HostJob) -> None:
        self._job = job

    def leader(self, seen_from: Host) -> Host:
        """Return the host whose member leads; ``AssertionError`` when there is none just now."""
        told = self._ask(seen_from, "endpoint", "status", "--cluster")
        leaders = [each["Endpoint"] for each in told
                   if each["Status"]["leader"] == each["Status"]["header"]["member_id"]]  # fmt: skip
        assert len(leaders) == 1, told
        return self._host_at(leaders[0])

    def voters(self, seen_from: Host) -> set[str]:
        """Return the names of the hosts whose members have a vote; empty as long as nobody answers."""
        try:
            found = self._ask(seen_from, "member", "list")["members"]
        except (AssertionError, ValueError):
            return set()
        urls = [url for each in found if not each.get("isLearner") for url in each.get("clientURLs", [])]
        return {self._host_at(url).name for url in urls}

    def lead(self, host: Host) -> None:
        """Have a host's member lead."""
        told = self._ask(host, "endpoint", "status", "--cluster")
        (to,) = [each["Status"]["header"]["member_id"] for each in told if self._host_at(each["Endpoint"]) is host]
        host.call(*self._words(self.leader(host), "move-leader", f"{to:x}"))

    def _ask(self, seen_from: Host, *words: str) -> Any:
        return json.loads(seen_from.call(*self._words(None, *words, "--write-out=json")))

    def _words(self, only: Host | None, *words: str) -> list[str]:
        url = urlsplit((self._job.directory / "store").read_text())
        files = dict(parse_qsl(url.query))
        endpoints = [each for each in url.netloc.split(",") if only is None or each.startswith(only.address)]
        tool = str(Path(find_program()).with_name("etcdctl"))
        where = ",".join(f"https://{each}" for each in endpoints)
        keys = (f"--cacert={files['ca']}", f"--cert={files['cert']}", f"--key={files['key']}")
        return [tool, f"--endpoints={where}", *keys, *words]

    def _host_at(self, url: str) -> Host:
        (found,) = [host for host in self._job.box.hosts if f"//{host.address}:" in url]
        return found


def undisturbed(directory: Path, num_steps: int, *flags: str) -> str:
    """Steps and digest of the script in one process, without a launcher, a host or a fault."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(directory), str(num_steps), "0", *flags]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "digest-rank0").read_text()
