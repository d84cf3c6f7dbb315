"""Jobs of several agents on one machine: agreement, the loss of a node, of the store, and late joiners."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from tests.comm.stores.conftest import Server, etcd_cluster
from tests.launch.conftest import complete_rows as lines

from phalanx.comm.stores import TCPStore
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous._store_records import write_once
from phalanx.launch.system._linux import children_of
from phalanx.protocol import CLOSED, Closing, job_prefix

pytestmark = pytest.mark.timeout(400)

SHORT = ("--rdzv-conf", "lease=4,last_call_timeout=1,admit_delay=0.1,join_timeout=90")
"""For a node that shall be missed soon after it was killed. Given last, it takes the place of the long lease."""


@pytest.fixture
def endpoint(held_port: int) -> tuple[str, ...]:
    # The lease is long: nobody is taken for dead because the machine stalls for some seconds.
    conf = "lease=40,last_call_timeout=1,admit_delay=0.1,join_timeout=90"
    return (
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}", "--rdzv-id", "nodes",
        "--rdzv-conf", conf,
    )  # fmt: skip


def test_two_nodes_agree_on_ranks_and_end_together(launcher, tmp_path, endpoint):
    words = ("--nnodes", 2, "--nproc-per-node", 2, *endpoint, "--max-restarts", 1)
    agents = [launcher.run(*words, "summing.py", tmp_path, 3, "3:1:kill") for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], [agent.output for agent in agents]
    starts = lines(tmp_path / "starts")
    # One restart for the whole job, and every rank of four started in each generation.
    assert sorted((g, restart, rank, size) for g, restart, rank, size, _ in starts) == sorted(
        (str(g), str(g), str(rank), "4") for g in range(2) for rank in range(4)
    )
    launcher.wait_until_empty()


def test_two_jobs_at_one_endpoint_are_told_apart_by_their_ids(launcher, tmp_path, wait_for, held_port):
    """Of two agents with the same id the second is a spare of the first's job; another id is another job."""

    def run(name: str, folder: str):
        (tmp_path / folder).mkdir(exist_ok=True)
        words = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}", "--rdzv-id", name)
        return launcher.run("--nnodes", "1:1", *words, "summing.py", tmp_path / folder, 100000, STEP_SECONDS="0.01")

    def starts(folder: str) -> int:
        return len(lines(tmp_path / folder / "starts"))

    first = run("one", "first")
    wait_for(lambda: starts("first"), "the first job", first)
    again, other = run("one", "again"), run("two", "other")
    wait_for(lambda: "this node is a spare: job 'one' has its 1 node(s)" in again.output, "a spare", again)
    wait_for(lambda: starts("other"), "another job at the same endpoint", other)
    (tmp_path / "other" / "end").touch()
    assert other.wait() == 0, other.output
    (tmp_path / "first" / "end").touch()
    assert [first.wait(), again.wait()] == [0, 0], first.output + again.output
    assert [starts(folder) for folder in ("first", "again", "other")] == [1, 0, 1]
    launcher.wait_until_empty()


def test_root_cause_is_reported_on_every_node(launcher, tmp_path, endpoint):
    words = ("--nnodes", 2, *endpoint)
    agents = [launcher.run(*words, "summing.py", tmp_path, 3, "1:1:raise") for _ in range(2)]
    assert [agent.wait() for agent in agents] == [1, 1]
    for agent in agents:
        report = agent.output.partition("Root cause (the earliest failure):")[2]
        assert "RuntimeError: told to fail" in report, agent.output
        assert "rank      : 1" in report, agent.output


def test_root_cause_is_reported_on_every_node_though_its_own_node_notices_it_last(
    launcher, tmp_path, endpoint, wait_for
):
    """On the victim's node nobody hears of its end until the other node has heard a complaint and given up."""
    agents = [launcher.run("--nnodes", 2, *endpoint, "for_ever.py", tmp_path) for _ in range(2)]
    wait_for(lambda: len(lines(tmp_path / "ready")) == 2, "two workers", agents[0])
    _, (_, victim, zygote) = sorted(lines(tmp_path / "ready"))
    other = next(agent for agent in agents if int(zygote) not in children_of(agent.pid))
    os.kill(int(zygote), signal.SIGSTOP)
    try:
        os.kill(int(victim), signal.SIGKILL)
        wait_for(lambda: "generation 0 is over (fail): rank 0" in other.output, "the complaint", other)
    finally:
        os.kill(int(zygote), signal.SIGCONT)
    assert [agent.wait() for agent in agents] == [1, 1]
    for agent in agents:
        report = agent.output.partition("Root cause (the earliest failure):")[2]
        assert "rank      : 1" in report, agent.output
        assert "exitcode  : -9 (SIGKILL)" in report, agent.output
    launcher.wait_until_empty()


@pytest.mark.again
@pytest.mark.parametrize("policy", ["restart", "heal"])
def test_a_node_that_is_killed_is_left_behind(launcher, tmp_path, endpoint, wait_for, policy):
    """A whole node of three dies; the job forms again with the two that are left."""
    # The survivors' workers fail too, when their peer's connections close: under restart that takes a restart.
    words = ("--nnodes", "2:3", "--on-failure", policy, "--max-restarts", 3, *endpoint)
    script = ("summing.py" if policy == "restart" else "healing.py", tmp_path, 100000)
    host = launcher.run(*words, *script, STEP_SECONDS="0.2")
    wait_for(lambda: _is_listening(host.pid, endpoint), "the node that serves the store", host)
    other = launcher.run(*words, *script, STEP_SECONDS="0.2")
    victim = launcher.run(*words, *SHORT, *script, STEP_SECONDS="0.2")

    def formed(size: int) -> bool:
        """Whichever generation it is: a node that was slow to come is admitted in a later one."""
        if policy == "heal":
            return _last_size(tmp_path) == {str(size)}
        starts = lines(tmp_path / "starts")
        newest = max((int(row[0]) for row in starts), default=-1)
        return [row[3] for row in starts if int(row[0]) == newest] == [str(size)] * size

    wait_for(lambda: formed(3), "three nodes in one generation", host)
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: formed(2), "a generation of two", host)
    (tmp_path / "end").touch()
    assert [agent.wait() for agent in (host, other)] == [0, 0], [agent.output for agent in (host, other)]
    assert formed(2)
    launcher.wait_until_empty()


@pytest.mark.again
def test_the_loss_of_the_store_ends_the_other_nodes_with_a_clear_error(launcher, tmp_path, endpoint, wait_for):
    words = ("--nnodes", 2, *endpoint, "summing.py", tmp_path, 100000)
    host = launcher.run(*words, STEP_SECONDS="0.2")
    wait_for(lambda: _is_listening(host.pid, endpoint), "the node that serves the store", host)
    other = launcher.run(*words, STEP_SECONDS="0.2")
    wait_for(lambda: len(lines(tmp_path / "starts")) == 2, "two workers", other)
    os.kill(host.pid, signal.SIGKILL)
    assert other.wait() == 1
    assert "lost the store of job 'nodes'" in other.output
    assert "is that one still running?" in other.output
    launcher.wait_until_empty()


def test_a_late_node_is_admitted_at_a_step_boundary(launcher, tmp_path, endpoint, wait_for):
    words = ("--nnodes", "1:2", "--on-failure", "heal", *endpoint)
    first = launcher.run(*words, "healing.py", tmp_path, 100000, STEP_SECONDS="0.05")
    wait_for(lambda: _last_size(tmp_path) == {"1"}, "the first node to train alone", first)
    second = launcher.run(*words, "healing.py", tmp_path, 100000, STEP_SECONDS="0.05")
    wait_for(
        lambda: len(stories(tmp_path)) == 2 and _last_size(tmp_path) == {"2"},
        "both to train together",
        second,
    )
    (tmp_path / "end").touch()
    assert [first.wait(), second.wait()] == [0, 0], (first.output, second.output)
    old = max(stories(tmp_path), key=len)
    steps = [int(row[1]) for row in old if row[0].isdigit()]
    assert steps == list(range(len(steps)))  # nothing lost, nothing twice
    assert "lost" not in {row[0] for row in old}


def stories(directory: Path) -> list[list[list[str]]]:
    """What each worker of a healing.py job wrote."""
    return [lines(path) for path in directory.glob("*.*.*")]


def _last_size(directory: Path) -> set[str]:
    """The group sizes of the newest generation, by those who have made a step in it."""
    rows = [row for story in stories(directory) for row in story if row[0].isdigit() and len(row) == 5]
    newest = max((int(row[0]) for row in rows), default=-1)
    return {row[3] for row in rows if int(row[0]) == newest}


def _is_listening(pid: int, endpoint: tuple[str, ...]) -> bool:
    """Whether a process serves the endpoint: its socket is among the listening ones of the machine."""
    port = int(endpoint[3].rpartition(":")[2])
    inodes = {
        row.split()[9]
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A"
    }
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).removeprefix("socket:[").removesuffix("]") in inodes:
                return True
        except OSError:
            continue
    return False


@pytest.mark.again
def test_the_job_goes_on_when_the_etcd_leader_is_killed(launcher, tmp_path, wait_for):
    """Three etcd members, two agents; the member that leads is killed, then a worker: the job still heals."""
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(3, tmp_path / "etcd") as servers:
        members = ",".join(server.url.removeprefix("etcd://") for server in servers)
        words = ("--nnodes", 2, "--rdzv-backend", "etcd", "--rdzv-endpoint", members, "--rdzv-id", "etcd-job")
        conf = ("--rdzv-conf", "lease=40,last_call_timeout=1", "--max-restarts", 3)
        script = ("summing.py", tmp_path, 100000)
        agents = [launcher.run(*words, *conf, *script, STEP_SECONDS="0.2") for _ in range(2)]
        wait_for(lambda: len(lines(tmp_path / "starts")) == 2, "two workers", agents[0])
        _leader(servers).kill()
        os.kill(int(lines(tmp_path / "starts")[0][4]), signal.SIGKILL)
        wait_for(lambda: len(lines(tmp_path / "starts")) == 4, "two workers once more", agents[0])
        (tmp_path / "end").touch()
        assert [agent.wait() for agent in agents] == [0, 0], [agent.output for agent in agents]
    assert [row[0] for row in lines(tmp_path / "starts")] == ["0", "0", "1", "1"]
    assert sorted(lines(tmp_path / "ends")) == [["0"], ["1"]]
    launcher.wait_until_empty()


def test_a_job_outlives_the_restart_of_its_only_etcd_member(launcher, tmp_path, wait_for):
    """Agents and workers wait for it: nobody dies, no generation ends."""
    (tmp_path / "etcd").mkdir()
    (tmp_path / "out").mkdir()

    def rows() -> list[list[list[str]]]:
        return [lines(path) for path in (tmp_path / "out").glob("*.*.*")]

    with etcd_cluster(1, tmp_path / "etcd") as (server,):
        endpoint = ("--rdzv-endpoint", server.url.removeprefix("etcd://"), "--rdzv-id", "restarting")
        agent = launcher.run(
            "--nproc-per-node", 2, "--rdzv-backend", "etcd", *endpoint, "--on-failure", "heal",
            "healing.py", tmp_path / "out", 100000,
        )  # fmt: skip
        wait_for(lambda: len(rows()) == 2 and all(len(each) > 5 for each in rows()), "two workers", agent)
        server.kill()
        time.sleep(1.0)  # so long is it away
        server.start_again()
        known = max(len(each) for each in rows())
        wait_for(lambda: all(len(each) > known + 5 for each in rows()), "the workers to go on", agent)
        (tmp_path / "out" / "end").touch()
        assert agent.wait() == 0, agent.output
    assert [each[-1] for each in rows()] == [["finished", "0"]] * 2
    launcher.wait_until_empty()


def _leader(servers: list[Server]) -> Server:
    """The member that leads; during an election there is none for a moment."""
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + 90
    while time.monotonic() < until:
        for server in servers:
            address = server.url.removeprefix("etcd://")
            url = f"http://{address}/v3/maintenance/status"
            with no_proxy.open(urllib.request.Request(url, data=b"{}", method="POST"), timeout=90) as answer:
                status = json.load(answer)
            if status["leader"] == status["header"]["member_id"]:
                return server
    raise AssertionError("no member of the etcd cluster says that it leads")


def test_a_node_that_comes_as_the_job_ends_has_nothing_to_do(launcher, tmp_path, endpoint):
    """The store is served elsewhere, as by the agent of another machine that still waits for the last node to leave."""
    *_, conf = endpoint
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint[3], "--rdzv-id", "nodes")
    words = ("--nnodes", "1:2", *where, "--rdzv-conf", f"{conf},is_host=false")
    host, port = endpoint[3].split(":")
    with contextlib.closing(TCPStore.serve(host, int(port))) as store:
        store.set("phalanx/served", b"{}")
        job = store.namespace(job_prefix("nodes"))
        assert write_once(job, Signer("nodes", None), CLOSED, Closing(reason="closed by node a"))
        late = launcher.run(*words, "summing.py", tmp_path, 1)
        assert late.wait() == 0, late.output
    assert "came too late to take part" in late.output
    assert not (tmp_path / "starts").exists()
