"""Stopping workers that do not want to stop, without any process: the pool on a zygote that only pretends."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from phalanx.comm.stores import MemoryStore
from phalanx.errors import StoreLost
from phalanx.launch.agent._sources import AllDone, Sources
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.hang import _hang_watch
from phalanx.launch.hang._hang_watch import HangWatch, frames_of
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.system import _linux
from phalanx.launch.telemetry._logs import DefaultLogsSpecs
from phalanx.launch.workers import _pool
from phalanx.launch.workers._pool import WorkerPool
from phalanx.launch.workers._processes import WorkerProcess
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._worker_environment import JobFacts, RankAssignment
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.protocol import ProgressReport

pytestmark = pytest.mark.fast

JOB = JobFacts(run_id="j", restarts=0)


class StuckProcess(WorkerProcess):
    """Takes signals and does not mind them, as one in uninterruptible sleep."""

    def __init__(self, pid: int, dies_by: int | None) -> None:
        ours, self.theirs = socket.socketpair()
        super().__init__(pid, ours, ours)
        self.got: list[int] = []
        self.dies_by = dies_by
        self.pool: WorkerPool | None = None

    def send_signal(self, signum: int, *, to_group: bool = True) -> None:
        self.got.append(signum)
        if signum == self.dies_by and self.exit_code is None:
            self.end(-signum)
            assert self.pool is not None
            self.pool._on_exit(self)


class PretendZygote:
    is_idle = True

    def __init__(self, *processes: StuckProcess) -> None:
        self._processes = list(processes)

    def park(self) -> tuple[StuckProcess, bool]:
        return self._processes.pop(0), True

    def close(self) -> None:
        pass


def pool_of(tmp_path, *processes: StuckProcess) -> tuple[WorkerPool, list[str]]:
    told: list[str] = []
    config = LaunchConfig(
        1, 1, 2, DefaultLogsSpecs(str(tmp_path)), shutdown_timeout=0.1, hang_timeout=10, start_timeout=0,
        monitor_interval=math.inf,
    )  # fmt: skip
    start = WorkerStart(entrypoint="cmd", args=(), method="exec")
    pool = WorkerPool(config, start, PretendZygote(*processes), lambda worker: told.append(worker.id))
    for process in processes:
        process.pool = pool
    assignments = [
        RankAssignment(
            worker_id=f"w{n}", rank=n, local_rank=n, world_size=2, local_size=2, node_rank=0, num_nodes=1, generation=0,
            master_addr="h", master_port=1, store_url="memory://x", role_rank=n, role_size=2,
        )
        for n in range(len(processes))
    ]  # fmt: skip
    pool.start(assignments, JOB)
    return pool, told


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "KILL_PATIENCE", 0.1)


def test_a_worker_that_the_kernel_holds_is_named_and_left_behind(tmp_path, quick, caplog):
    stuck, normal = StuckProcess(1, None), StuckProcess(2, signal.SIGTERM)
    pool, told = pool_of(tmp_path, stuck, normal)
    with caplog.at_level(logging.ERROR):
        pool.stop()
    assert told == ["w1"]
    assert signal.SIGKILL in stuck.got
    assert "worker w0 (pid 1" in caplog.text
    assert "does not die" in caplog.text
    pool.close()
    for process in (stuck, normal):
        process.theirs.close()


def test_hurry_shortens_the_patience(tmp_path, quick):
    deaf = StuckProcess(1, signal.SIGKILL)
    pool, told = pool_of(tmp_path, deaf)
    pool.hurry()
    pool.config.shutdown_timeout = 3600
    pool.stop(signal.SIGINT)
    assert deaf.got[0] == signal.SIGINT
    assert told == ["w0"]
    pool.close()
    deaf.theirs.close()


def test_an_exit_is_told_once_even_if_it_came_before_the_order(tmp_path, quick):
    class Dying(StuckProcess):
        def order(self, order, fds):
            super().order(order, fds)
            self.exit_code = 1
            self.pool._on_exit(self)

    dying = Dying(1, None)
    pool, told = pool_of(tmp_path, dying)
    assert told == ["w0"]
    pool.close()
    dying.theirs.close()


def test_a_failure_is_dated_by_the_end_of_the_process_not_by_when_it_was_looked_at(tmp_path):
    """Else one that was killed would come after its peers' complaints about it, and not be named as the cause."""
    killed = StuckProcess(1, signal.SIGKILL)
    pool, told = pool_of(tmp_path, killed)
    killed.ended_at = 5.0
    killed.send_signal(signal.SIGKILL)
    assert told == ["w0"]
    assert pool.failure_of(pool.workers["w0"]).timestamp == 5.0
    pool.close()
    killed.theirs.close()


def test_nobody_goes_on_before_every_node_has_written_its_stacks(tmp_path, monkeypatch):
    """Who finds a hang kills: what the other node's workers were doing must be on paper by then."""
    monkeypatch.setattr(_hang_watch, "_PATIENCE", 0.1)  # its own worker is only pretended, and will not write
    store = MemoryStore()
    silent = StuckProcess(1, signal.SIGKILL)
    pool, _ = pool_of(tmp_path, silent)
    info = SimpleNamespace(generation=3, rank=0, world_size=2, store=store)
    written: list[str] = []

    def other_node() -> None:
        channel = AgentChannel(store.clone())
        while not channel.read_requests(3, "node1")[1]:
            time.sleep(0.005)
        time.sleep(0.2)  # its workers take a while to write
        written.append("stacks")
        channel.say_done(3, 1, "stacks")

    other = threading.Thread(target=other_node)
    other.start()
    watch = HangWatch(pool.config, pool)
    assert watch.check({"w0": ProgressReport(step=3).to_json()}, info, now=0) is None
    assert watch.check({"w0": ProgressReport(step=4).to_json()}, info, now=0) is None
    assert watch.check({"w0": ProgressReport(step=4).to_json()}, info, now=11) is None  # they are being written
    assert watch._dump.is_written.wait(60)
    worker, reason = watch.check({"w0": ProgressReport(step=4).to_json()}, info, now=11)
    assert written == ["stacks"]
    assert worker.id == "w0"
    assert reason == "rank 0 made no progress for 10 s after step 4; it did not say what it does"
    other.join()
    pool.close()
    silent.theirs.close()


def test_a_store_that_is_gone_before_the_threads_have_begun_is_no_crash_of_theirs(monkeypatch):
    """A job of milliseconds: it may be over, and its store closed, before the thread for requests runs at all."""

    class ClosedStore(MemoryStore):
        def clone(self):
            raise StoreLost("closed by this client", address=self.address)

    crashes: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    watch = SimpleNamespace(wait=lambda timeout: None, close=lambda: None)
    sources = Sources(SimpleNamespace(watch_generation=lambda generation: watch))
    info = SimpleNamespace(store=ClosedStore(), generation=0, world_size=2)
    before = set(threading.enumerate())
    sources.follow(info, 0.0, list)
    sources.wait_all_done(info, 60)
    assert sources.next(60) == AllDone(0, "closed by this client")
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    sources.leave_generation()
    assert crashes == []


WRITES_SLOWLY = """
import os, signal, sys, time
path = sys.argv[1]
def write(*_):
    for line in ("Current thread 0x1:", '  File "/a.py", line 1 in inner', '  File "/a.py", line 2 in outer'):
        with open(path, "a") as file:
            file.write(line + "\\n")
        time.sleep(0.3)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.readline()
import ctypes
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
ctypes.CDLL(None).signal(int(sys.argv[2]), handler)
print("catches", flush=True)
while True:
    time.sleep(600)
"""


def test_stacks_are_read_when_all_is_written_and_not_waited_for_from_who_writes_none(tmp_path, monkeypatch):
    """As a worker is held up between two lines of its stacks: the C handler of a signal, which blocks the signal."""
    log, signum = tmp_path / "stacks.log", _linux.stack_signal()
    command = [sys.executable, "-c", WRITES_SLOWLY, str(log), str(int(signum))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as slow:
        try:
            monkeypatch.setattr(_hang_watch, "_PATIENCE", 100)
            monkeypatch.setattr(WorkerProcess, "send_signal", lambda self, sent, **_: os.kill(self.pid, sent))
            ours, theirs = socket.socketpair()
            process = WorkerProcess(slow.pid, ours, ours)
            assignment = SimpleNamespace(rank=0, worker_id="w")
            pool = SimpleNamespace(running=[WorkerHandle(assignment=assignment, process=process, stacks_file=str(log))])
            assert slow.stdout.readline() == "ready\n"
            monkeypatch.setattr(_linux, "stack_signal", lambda: signal.SIGUSR1)
            assert _hang_watch.dump_stacks(pool.running, "of a test") == {"w": ""}  # does not catch it
            slow.stdin.write("\n")
            slow.stdin.flush()
            assert slow.stdout.readline() == "catches\n"
            monkeypatch.setattr(_linux, "stack_signal", lambda: signum)
            found = _hang_watch.dump_stacks(pool.running, "of a test")["w"]
            assert [str(frame) for frame in frames_of(found)] == ["inner (a.py:1)", "outer (a.py:2)"]
            process.discard()
            theirs.close()
        finally:
            slow.kill()


ASKED = "Current thread 0x1 (most recent call first):\n"
WAITS = f'{ASKED}  File "/x/torch/distributed/distributed_c10d.py", line 9 in wait\n'
SLEEPS = (
    'Thread 0x2 (most recent call first):\n  File "/x/phalanx/comm/failure/_liveness.py", line 3 in run\n\n'
    f'{ASKED}  File "/w/train.py", line 7 in load\n  File "/w/train.py", line 9 in main\n'
)


def test_who_waits_for_the_one_that_hangs_is_not_blamed_for_it(tmp_path, monkeypatch):
    """Rank 0 waits and has been silent for longest; rank 1, which it waits for, is late a moment after it."""
    dumps = []
    monkeypatch.setattr(_hang_watch, "dump_stacks", lambda workers, reason: dumps.append(reason) or stacks)
    pool, _ = pool_of(tmp_path, *(processes := [StuckProcess(n, signal.SIGKILL) for n in (1, 2)]))
    store, stacks = MemoryStore(), {"w0": WAITS, "w1": SLEEPS}
    info = SimpleNamespace(generation=0, rank=0, world_size=1, store=store)
    watch = HangWatch(pool.config, pool)

    def check(now: float):
        found = watch.check(at, info, now)
        if watch._dump is not None and found is None:
            assert watch._dump.is_written.wait(60)
            found = watch.check(at, info, now)
        return found

    at = {"w0": ProgressReport(step=4).to_json(), "w1": ProgressReport(step=3).to_json()}
    assert check(now=0) is None
    at["w1"] = ProgressReport(step=4).to_json()
    assert check(now=1) is None
    assert check(now=10.5) is None  # only the one that waits is late
    worker, reason = check(now=11.5)
    assert worker.assignment.rank == 1
    assert reason == (
        "rank 1 made no progress for 10 s after step 4; it is in load (train.py:7), while rank 0 waits in a collective"
    )
    assert len(dumps) == 1
    assert check(now=12) is None  # everybody has the full time again
    stacks["w1"] = WAITS  # now both wait for each other: the exchange itself hangs
    assert check(now=22) is None
    assert check(now=32)[0].assignment.rank == 0
    pool.close()
    for process in processes:
        process.theirs.close()


def test_what_stands_by_is_forked_while_nobody_waits(tmp_path):
    """A fork takes as long as a whole regroup: survivors of a death should not share their cores with it."""
    worker, spare, successor = (StuckProcess(pid, signal.SIGTERM) for pid in (1, 2, 3))
    pool, _ = pool_of(tmp_path, worker)
    pool.config.standby = 1
    pool._started_at -= _pool.SETTLED
    pool._zygotes = PretendZygote(spare, successor)
    pool.prepare(0)
    assert not pool._parked, "nothing is forked beside what is needed now"
    pool._zygotes.is_idle = False
    pool.refill()
    assert not pool._parked, "the zygote still imports what the fork should have"
    pool._zygotes.is_idle = True
    pool.refill()
    pool.refill()
    assert [process for process, _ in pool._parked] == [spare]
    pool.prepare(1)
    assert [process for process, _ in pool._parked] == [spare], "it is there: nothing is forked at a death"
    taken, _ = pool._take_parked()
    taken.let_go()
    pool.refill()
    assert [process for process, _ in pool._parked] == [successor]
    pool.close()
    for process in (worker, spare, successor):
        process.theirs.close()
