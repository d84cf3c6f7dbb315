"""Stopping workers that do not want to stop, without any process: the crew on a zygote that only pretends."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from phalanx.comm.stores import MemoryStore
from phalanx.launch import _crew
from phalanx.launch._crew import Crew, CrewOptions
from phalanx.launch._diagnosis import write_stacks_everywhere
from phalanx.launch._environment import JobFacts, Place
from phalanx.launch._journal import Journal
from phalanx.launch._logs import DefaultLogsSpecs
from phalanx.launch._orders import Plan
from phalanx.launch._processes import WorkerProcess

pytestmark = pytest.mark.fast

JOB = JobFacts(run_id="j", role="r", restarts=0, max_restarts=0, on_failure="restart", use_agent_store=True)


class StuckProcess(WorkerProcess):
    """Takes signals and does not mind them, as one in uninterruptible sleep."""

    def __init__(self, pid: int, dies_by: int | None) -> None:
        ours, self.theirs = socket.socketpair()
        super().__init__(pid, ours)
        self.got: list[int] = []
        self.dies_by = dies_by
        self.crew: Crew | None = None

    def send_signal(self, signum: int, *, to_group: bool = True) -> None:
        self.got.append(signum)
        if signum == self.dies_by and self.exit_code is None:
            self.exit_code = -signum
            assert self.crew is not None
            self.crew._on_exit(self)


class PretendZygote:
    def __init__(self, *processes: StuckProcess) -> None:
        self._processes = list(processes)

    def park(self) -> StuckProcess:
        return self._processes.pop(0)

    def close(self) -> None:
        pass


def crew_of(tmp_path, *processes: StuckProcess) -> tuple[Crew, list[str]]:
    told: list[str] = []
    options = CrewOptions(
        plan=Plan(entrypoint="cmd", args=(), method="exec"), logs_specs=DefaultLogsSpecs(str(tmp_path))
    )
    crew = Crew(PretendZygote(*processes), options, lambda member: told.append(member.id))
    for process in processes:
        process.crew = crew
    places = [
        Place(
            worker_id=f"w{n}", rank=n, local_rank=n, world_size=2, local_size=2, node_rank=0, num_nodes=1, generation=0,
            master_addr="h", master_port=1, store_url="memory://x", role_rank=n, role_size=2,
        )
        for n in range(len(processes))
    ]  # fmt: skip
    crew.start(places, JOB)
    return crew, told


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_crew, "KILL_PATIENCE", 0.1)


def test_a_worker_that_the_kernel_holds_is_named_and_left_behind(tmp_path, quick, caplog):
    stuck, normal = StuckProcess(1, None), StuckProcess(2, signal.SIGTERM)
    crew, told = crew_of(tmp_path, stuck, normal)
    with caplog.at_level(logging.ERROR):
        crew.stop(signal.SIGTERM, patience=0.1)
    assert told == ["w1"]
    assert signal.SIGKILL in stuck.got
    assert "worker w0 (pid 1" in caplog.text
    assert "does not die" in caplog.text
    crew.close()
    for process in (stuck, normal):
        process.theirs.close()


def test_hurry_shortens_the_patience(tmp_path, quick):
    deaf = StuckProcess(1, signal.SIGKILL)
    crew, told = crew_of(tmp_path, deaf)
    crew.hurry()
    crew.stop(signal.SIGINT, patience=3600)
    assert deaf.got[0] == signal.SIGINT
    assert told == ["w0"]
    crew.close()
    deaf.theirs.close()


def test_an_exit_is_told_once_even_if_it_came_before_the_order(tmp_path, quick):
    class Dying(StuckProcess):
        def order(self, order, fds):
            super().order(order, fds)
            self.exit_code = 1
            self.crew._on_exit(self)

    dying = Dying(1, None)
    crew, told = crew_of(tmp_path, dying)
    assert told == ["w0"]
    crew.close()
    dying.theirs.close()


def test_nobody_goes_on_before_every_node_has_written_its_stacks(tmp_path):
    """Who finds a hang kills: what the other node's workers were doing must be on paper by then."""
    store = MemoryStore()
    crew, _ = crew_of(tmp_path)
    info = SimpleNamespace(rank=0, world_size=2, store=store)
    generation = SimpleNamespace(journal=Journal(store), number=3, info=info)
    asked, written = threading.Event(), []

    def other_node() -> None:
        journal = Journal(store.clone())
        while not journal.read_requests(3, "node1")[1]:
            time.sleep(0.005)
        asked.set()
        time.sleep(0.2)  # its workers take a while to write
        written.append("stacks")
        journal.say_done(3, 1, "stacks")

    other = threading.Thread(target=other_node)
    other.start()
    write_stacks_everywhere(crew, generation, "rank 0 made no progress")
    assert written == ["stacks"]
    assert asked.is_set()
    other.join()
    crew.close()
