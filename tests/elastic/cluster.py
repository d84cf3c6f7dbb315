"""A job of real processes under ``phalanx run --on-failure heal``, and the means to look at it and to hurt it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from log_lines import read_lines
from phalanx.elastic.audit import Verdict, check_directory
from phalanx.launch.cli._scale import scale

SCRIPT = Path(__file__).parent / "worker_script.py"
PRELOAD = "torch._dynamo,phalanx.elastic"
NUM_STEPS = 60


@dataclass(frozen=True)
class Node:
    """Where an agent runs: the command that brings it there, flags of its own, and those of its script."""

    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    script_flags: tuple[str, ...] = ()


class Cluster:
    """Agents, mostly one, and their workers; everything that they write is under ``directory``.

    With ``hold`` the workers go no further than to that step until ``release``.
    """

    def __init__(
        self,
        directory: Path,
        num_workers: int,
        num_steps: int = NUM_STEPS,
        pace: float = 0.01,
        *,
        hold: int | None = None,
        script: Path = SCRIPT,
        nodes: Sequence[Node] = (Node(),),
        **options: str,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        if hold is not None:
            self.hold(hold)
        self.size = num_workers
        self.scratch = directory / "tmp"
        self.scratch.mkdir(parents=True, exist_ok=True)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "script_flag"]
        self._flags = [f"--nproc-per-node={num_workers}", "--on-failure=heal", f"--preload={PRELOAD}"]
        self._flags += ["--console=plain", *flags]  # what workers print is looked at as it is
        script_flag = options.get("script_flag", "").split()
        self._command = [str(script), str(directory), str(num_steps), str(pace), *script_flag]
        self.output = (directory / "output").open("wb")
        self.agents: list[subprocess.Popen[bytes]] = []
        for node in nodes:
            self.add(node)
        self.process = self.agents[0]

    def add(self, node: Node) -> None:
        """Start another agent."""
        self.agents.append(
            subprocess.Popen(
                [*node.prefix, sys.executable, "-m", "phalanx", "run", *self._flags, *node.flags,
                 *self._command, *node.script_flags],
                stdout=self.output, stderr=subprocess.STDOUT, cwd=self.directory,
                env={**os.environ, "TMPDIR": str(self.scratch)},
            )
        )  # fmt: skip

    # -- looking ----------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Workers that have begun and live, by their ids, oldest first."""
        found = {}
        for path in self.directory.glob("pid-*"):
            words = path.read_text().split()
            if len(words) == 2 and started(int(words[0])) == words[1]:  # and no later process with its number
                found[path.name.removeprefix("pid-")] = int(words[0])
        return dict(sorted(found.items(), key=lambda item: int(item[0].rpartition(".")[2])))

    def step(self) -> int:
        """How many steps are committed."""
        steps = [-1]
        for path in (self.directory / "logs").glob("audit-*.jsonl"):
            steps += [record["step"] for record in read_lines(path) if record["kind"] == "commit"]
        return max(steps) + 1

    def events(self, kind: str) -> list[dict]:
        paths = (self.directory / "logs").glob("events-*.jsonl")
        found = [record for path in paths for record in read_lines(path) if record["event"] == kind]
        return sorted(found, key=lambda record: record["time"])

    def text(self) -> str:
        self.output.flush()
        return (self.directory / "output").read_text(errors="replace")

    def wait_until(self, condition, what: str, timeout: float = 150.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            has_ended = self.process.poll() is not None  # first: what it did last must be seen
            if condition():
                return
            assert not has_ended, f"ended before {what}:\n{self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen in {timeout} s:\n{self.text()[-4000:]}"
            time.sleep(0.02)

    def wait_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def wait_workers(self, count: int) -> None:
        """Until that many workers sit in one round."""
        self.wait_until(lambda: len(self.newest_round()) == count, f"a round of {count} workers")

    def newest_round(self) -> list[str]:
        """The workers that sit in it, in the order of their ranks."""
        rounds = self.events("regrouped")
        return max(rounds, key=lambda r: (r["generation"], r["round"]))["workers"] if rounds else []

    # -- what is left to the test and not to the speed of the machine ------------------------------------------

    def hold(self, step: int) -> None:
        """Let no worker pass this step, but for regroups, which need a boundary."""
        self._write("hold", str(step))

    def release(self) -> None:
        (self.directory / "hold").unlink()

    def close_door(self) -> None:
        """Workers that start from now on do not join before ``open_door``."""
        (self.directory / "closed").touch()

    def open_door(self) -> None:
        (self.directory / "closed").unlink()

    # -- hurting ----------------------------------------------------------------------------------------------

    def signal(self, worker: str, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[worker], signum)

    def tell(self, worker: str, wish: str) -> None:
        """Have a worker do something to itself before its next step; see ``fail`` in its script."""
        self._write(f"fail-{worker}", wish)

    def lie(self, worker: str, what: str) -> None:
        """Have a worker do something wrong; see ``lies``."""
        self._write(f"lie-{worker}", what)

    def slow_down(self, worker: str, seconds: float) -> None:
        """Have each batch take a worker so much longer."""
        self._write(f"slow-{worker}", str(seconds))

    def _write(self, name: str, text: str) -> None:
        (self.directory / f".{name}").write_text(text)
        (self.directory / f".{name}").rename(self.directory / name)

    def resize(self, size: int) -> None:
        """Ask the agent to run another number of workers."""
        scale((self.directory / "store").read_text(), (self.directory / "job").read_text(), size)
        self.size = size

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self, timeout: float = 150.0, *, tracebacks: Sequence[str] = ()) -> Verdict:
        """Wait for the end of the job; everything that must hold then, but for the digest.

        ``tracebacks`` are the last lines of those that the test has brought about; another is a failure.
        """
        deadline = time.monotonic() + timeout
        for agent in self.agents:
            try:
                code = agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"phalanx run did not end in {timeout} s:\n{self.text()[-6000:]}") from None
            assert code == 0, f"phalanx run ended with {code}:\n{self.text()[-6000:]}"
        unexpected = [line for line in errors_of(self.text()) if line not in tracebacks]
        assert unexpected == [], f"a worker that nobody killed has failed: {unexpected}\n{self.text()[-6000:]}"
        deadline = time.monotonic() + 60
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.pids() == {}, "workers outlived their agent"
        verdict = check_directory(self.directory / "logs")
        assert verdict.problems == []
        return verdict

    def digests(self) -> set[str]:
        """What the workers that reached the end printed: steps and digest."""
        return {path.read_text() for path in self.directory.glob("digest-*")}

    def left_behind(self, timeout: float = 60.0) -> list[str]:
        """What is still there of a job that has ended: processes, once they have had their time, and files.

        Not counted: the (empty) register of agents, and torch's own cache.
        """
        deadline = time.monotonic() + timeout
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        register = self.scratch / f"phalanx-{os.getuid()}"
        files = [path for path in [*self.scratch.iterdir(), *register.iterdir()] if path != register]
        found += [str(path) for path in files if not path.name.startswith("torchinductor_")]
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        pids = [str(record["pid"]) for record in self.events("started")]
        return found + [name for name in shared if "phalanx" in name or any(f"_{pid}_" in name for pid in pids)]

    def _processes(self) -> list[str]:
        """Those that were started with this job's scratch directory, and live."""
        mark = f"TMPDIR={self.scratch}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {folder.name} {(folder / 'cmdline').read_bytes()!r}")
            except OSError:
                continue  # it has ended meanwhile, or is somebody else's
        return found

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        self.output.close()


def errors_of(text: str) -> list[str]:
    """The last lines of all tracebacks in what processes printed; lines of agents may stand in their midst."""
    found = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line[0].isspace() and not line.startswith("phalanx: "):
            found.append(line)
            inside = False
    return found


def started(pid: int) -> str:
    """When a living process was started; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
