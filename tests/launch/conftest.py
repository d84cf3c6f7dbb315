"""Real agents in real processes, and the certainty that none of them, nor what they started, outlives a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"
PATIENCE = 100.0

# A name server that loses packets must not make tests slow; see phalanx.launch._environment.resolver_defaults.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


class AgentProcess:
    """One ``phalanx run``. ``output`` is what it and its workers printed so far."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the agent did not end within {PATIENCE:g} s; it printed:\n{self.output}"
            ) from None


class Launcher:
    """Starts agents whose descendants can all be found by a token in their environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents: list[AgentProcess] = []
        self.token = f"PHALANX_TEST_TOKEN={uuid.uuid4().hex}"

    def run(self, *words: object, **env: str) -> AgentProcess:
        """``phalanx run`` with these words. A worker script is named by its file name in ``workers``."""
        name, value = self.token.split("=")
        resolved = [str(WORKERS / word) if (WORKERS / str(word)).is_file() else str(word) for word in words]
        command = [sys.executable, "-m", "phalanx", "run", *resolved]
        log = self.directory / f"agent{len(self.agents)}.log"
        agent = AgentProcess(command, log, {**os.environ, "OMP_NUM_THREADS": "1", name: value, **env})
        self.agents.append(agent)
        return agent

    def descendants(self) -> dict[int, str]:
        """Living processes that belong to this test, agents included: pid and command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if self.token.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def wait_until_empty(self) -> None:
        """No process of this test is left."""
        until = time.monotonic() + 20
        while (left := self.descendants()) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"processes outlived the job: {left}"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for agent in launcher.agents:
        if agent.process.poll() is None:
            agent.process.kill()
        agent.process.wait()
    for pid in launcher.descendants():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Wait until a condition holds; the failure says for what."""

    def wait(condition: Callable[[], object], what: str, agent: AgentProcess | None = None) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            ended = agent is not None and agent.process.poll() is not None
            if time.monotonic() > until or (ended and not condition()):
                shown = f"; the agent printed:\n{agent.output}" if agent else ""
                raise AssertionError(
                    f"{'the agent ended before' if ended else 'waited in vain for'} {what}{shown}"
                )
            time.sleep(0.01)

    return wait
