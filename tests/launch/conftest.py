"""Real agents in real processes, and the certainty that none of them, nor what they started, outlives a test.

Agents are forked from one zygote that has imported torch (``cold=True`` for an interpreter of its own), which saves two
seconds each. That zygote adopts orphans, so whatever an agent leaves behind is found among its descendants.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from phalanx.launch.system._linux import children_of, process_state
from phalanx.launch.workers._processes import WorkerProcess, Zygote

WORKERS = Path(__file__).parent / "workers"
PATIENCE = 100.0

# A name server that loses packets must not make tests slow; see ``resolver_defaults`` of ``_worker_environment``.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


class AgentProcess:
    """One ``phalanx run``. ``output`` is what it and its workers printed so far."""

    def __init__(self, process: WorkerProcess, log: Path, ended: threading.Event) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log
        self._ended = ended

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> int:
        """The exit code."""
        if not self._ended.wait(PATIENCE):
            raise AssertionError(f"the agent did not end within {PATIENCE:g} s; it printed:\n{self.output}")
        assert self._process.exit_code is not None, "the event is set after the code"
        return self._process.exit_code


class Nursery:
    """The zygote that agents of all tests are forked from."""

    def __init__(self) -> None:
        self.zygote = Zygote.execute(("torch", "torch.distributed", "phalanx.launch.agent._launch"))
        self.ended: dict[int, threading.Event] = {}
        self.zygote.start(lambda process: self.ended[process.pid].set())
        self.zygote.wait_ready()

    def descendants(self) -> dict[int, str]:
        """Living processes under the zygote: pid and command line."""
        found, queue = {}, children_of(self.zygote.pid)
        while queue:
            pid = queue.pop()
            queue += children_of(pid)
            if process_state(pid) not in ("", "Z", "X"):
                try:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
        return found


class Launcher:
    """Starts agents and knows all of their descendants."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self.directory = directory
        self.agents: list[AgentProcess] = []
        self._nursery = nursery

    def run(self, *words: object, cold: bool = False, options: Sequence[str] = (), **env: str) -> AgentProcess:
        """``phalanx run`` with these words. A worker script is named by its file name in ``workers``.

        ``options`` are those of a cold agent's interpreter.
        """
        return self._start("phalanx", True, ["run", *_resolved(words)], cold=cold, options=options, **env)

    def launch(self, *words: object) -> AgentProcess:
        """``python -m phalanx.launch`` with these words."""
        return self._start("phalanx.launch", True, _resolved(words))

    def script(self, name: str, *words: object) -> AgentProcess:
        """A script of ``workers`` that is an agent itself."""
        return self._start(str(WORKERS / name), False, _resolved(words))

    def _start(
        self,
        target: str,
        is_module: bool,
        args: list[str],
        *,
        cold: bool = False,
        options: Sequence[str] = (),
        **env: str,
    ) -> AgentProcess:
        log = self.directory / f"agent{len(self.agents)}.log"
        process = self._nursery.zygote.park()
        ended = self._nursery.ended[process.pid] = threading.Event()
        order = {
            "kind": "script",
            "target": target,
            "is_module": is_module,
            "args": args,
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **env},
            "cpus": [],
            "cwd": os.getcwd(),
            "name": "phalanx-agent",
            "stacks": "",
        }
        if cold:
            order |= {"kind": "exec", "command": [sys.executable, *options, "-m", target, *args]}
        fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        copy = os.dup(fd)
        process.order(order, {"stdout": fd, "stderr": copy})
        os.close(fd)
        os.close(copy)
        agent = AgentProcess(process, log, ended)
        self.agents.append(agent)
        return agent

    def wait_until_empty(self) -> None:
        """No process of this test is left."""
        until = time.monotonic() + PATIENCE
        while (left := self._nursery.descendants()) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"processes outlived the job: {left}"


def _resolved(words: tuple[object, ...]) -> list[str]:
    return [str(WORKERS / str(word)) if (WORKERS / str(word)).is_file() else str(word) for word in words]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.zygote.close()


@pytest.fixture
def launcher(nursery: Nursery, tmp_path: Path) -> Iterator[Launcher]:
    yield Launcher(nursery, tmp_path)
    for _ in range(50):
        left = nursery.descendants()
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


@pytest.fixture
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 for a server of the test, or for nobody.

    It stays bound, but not listening, as long as the test runs: so the system gives it to no one who asks for any port,
    whoever connects too early is refused, and a server that names it may listen (both allow reuse).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def complete_rows(path: Path) -> list[list[str]]:
    """The words of each line of a file that others may be writing: a last line without its end is left out."""
    if not path.exists():
        return []
    return [line.split() for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait until a condition holds; the failure says for what."""

    def wait(condition: Callable[[], object], what: str, agent: AgentProcess | None = None) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            ended = agent is not None and agent.has_ended
            if time.monotonic() > until or (ended and not condition()):
                shown = f"; the agent printed:\n{agent.output}" if agent else ""
                raise AssertionError(f"{'the agent ended before' if ended else 'waited in vain for'} {what}{shown}")
            time.sleep(0.01)

    return wait
