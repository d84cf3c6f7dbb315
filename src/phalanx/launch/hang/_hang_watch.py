"""Finds the worker that hangs, and writes the stacks of all to the logs.

Owns ``HangWatch`` (the rule is ``_detector``'s), the dump and how it is read: every Python worker
writes its stacks to ``stacks.log`` beside its other logs when it gets a signal (``_child`` arranged that), also when it
is stuck in native code; the agent copies them to its own log. All nodes write before anybody is killed: a kill changes
what the others do. Whoever writes slowly or not at all is waited for in a thread: the agent's loop never is.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.comm import _background as background
from phalanx.errors import StoreError
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.hang._detector import HangDetector, parse_report
from phalanx.launch.hang._kernel_watch import KernelWatch
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.rendezvous._interface import RendezvousInfo
from phalanx.launch.system import _linux
from phalanx.launch.workers._pool import WorkerPool
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.protocol import timeouts

log = logging.getLogger(__name__)

_PATIENCE = 20.0
"""Seconds for workers to write their stacks; one that does not catch the signal is not waited for."""


_FRAME = re.compile(r'^ +File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVES = ("/torch/distributed/", "/phalanx/comm/")
"""Where the code lies that waits for other ranks."""


@dataclass
class _Dump:
    """Holds stacks on their way to the logs."""

    stacks: dict[str, str] = field(default_factory=dict)
    """What each worker was doing, by its id; complete once ``is_written``."""
    is_written: threading.Event = field(default_factory=threading.Event)


class HangWatch:
    """Finds the worker of this node that hangs. ``hang_timeout`` 0: it never looks, but answers another node."""

    def __init__(self, config: LaunchConfig, pool: WorkerPool) -> None:
        self.timeout = config.hang_timeout
        self._pool = pool
        self._kernel = KernelWatch.chosen(config.uninterruptible_state_timeout)
        self._detector = HangDetector(config.hang_timeout, config.start_timeout, config.request_interval)
        self._dump: _Dump | None = None
        """Made when somebody began to hang; None: nobody does."""
        self._has_answered = False
        """Whether stacks were written in this generation: another node's request stays in the store."""

    def begin_generation(self, now: float) -> None:
        self._detector.reset(now)
        self._dump = None
        self._has_answered = False

    def watched_ids(self) -> list[str]:
        """Return whose reports ``check`` wants to see."""
        return [worker.id for worker in self._pool.running] if self.timeout > 0 else []

    def held(self, now: float) -> str:
        """Say which worker the kernel has held for longer than ``uninterruptible_state_timeout``; "": none."""
        if self._kernel.timeout <= 0:
            return ""
        running = {worker.process.pid: worker for worker in self._pool.running}
        for pid in self._kernel.held({pid: _linux.process_state(pid) for pid in running}, now):
            worker = running[pid]
            worker.note = f"the kernel holds it (uninterruptible sleep) since {self._kernel.timeout:g} s or more"
            return f"rank {worker.assignment.rank} (pid {pid}): {worker.note}"
        return ""

    def answer(self, info: RendezvousInfo, reason: str) -> None:
        """Write stacks because another node asks for them; once for a generation."""
        if not self._has_answered and self._dump is None:
            self._dump = self._write(info, reason, everywhere=False)

    def kill_who_hangs(
        self, progress: Mapping[str, bytes | None], info: RendezvousInfo, now: float
    ) -> WorkerHandle | None:
        """Kill the worker to blame, and return it; its end is dealt with like any other's."""
        found = self.check(progress, info, now)
        if found is None:
            return None
        worker, reason = found
        log.error("%s; it is killed", reason)
        worker.note = f"{reason}; all stacks are in the logs"
        worker.process.send_signal(signal.SIGKILL)
        return worker

    def check(
        self, progress: Mapping[str, bytes | None], info: RendezvousInfo, now: float
    ) -> tuple[WorkerHandle, str] | None:
        """Return the worker to blame and why: then all get the full time again. None while nobody hangs, or it is
        not clear who, or not all stacks are written. Never blocks."""
        if self.timeout <= 0:
            return None
        stopped = {worker.id for worker in self._pool.running if _is_stopped(worker)}
        self._detector.observe(progress, now, stopped)
        late = [self._pool.workers[each] for each in self._detector.hanging(now) if each in self._pool.workers]
        if not late:
            self._dump = None
            return None
        if self._dump is None:
            reason = f"rank {late[0].assignment.rank} made no progress for {self._detector.limit(late[0].id):g} s"
            log.error("%s; writing all stacks", reason)
            self._dump = self._write(info, reason, everywhere=True)
        if not self._dump.is_written.is_set():
            return None
        waiting = {each for each, text in self._dump.stacks.items() if is_in_collective(frames_of(text))}
        worker = self._pool.workers.get(self._detector.to_blame(now, waiting) or "")
        if worker is None or not worker.is_running:
            return None
        text = self._explain(worker, self._dump.stacks, waiting - {worker.id}, progress.get(worker.id))
        self._detector.reset(now)
        return worker, text

    def _write(self, info: RendezvousInfo, reason: str, *, everywhere: bool) -> _Dump:
        """Begin to write the stacks of this node's workers; ``everywhere``: all nodes shall, and are waited for."""
        self._has_answered = True
        dump, workers = _Dump(), self._pool.running
        number = info.generation

        def write() -> None:
            try:
                with info.store.clone() as store:
                    channel = AgentChannel(store)
                    if everywhere:
                        channel.request_stacks(number, reason)
                    dump.stacks = dump_stacks(workers, reason)
                    channel.say_done(number, info.rank, "stacks")
                    if everywhere:
                        channel.wait_done(number, info.world_size, "stacks", timeouts.OTHER_AGENTS)
            except StoreError as error:
                log.warning("not every node has written its stacks: %s", error)
            dump.is_written.set()

        def failed(error: BaseException) -> None:
            log.error("the stacks could not be written: %r", error)
            dump.is_written.set()

        background.start(write, "phalanx-stacks", on_failure=failed)
        return dump

    def _explain(self, worker: WorkerHandle, stacks: Mapping[str, str], waiting: set[str], report: bytes | None) -> str:
        limit = self._detector.limit(worker.id)
        text = f"rank {worker.assignment.rank} made no progress for {limit:g} s{_step_of(report)}"
        frames = frames_of(stacks.get(worker.id, ""))
        if frames:
            text += f"; it is in {frames[0]}"
        elif _is_stopped(worker):
            text += "; it is stopped (by SIGSTOP, or a debugger)"
        else:
            text += "; it did not say what it does"
        ranks = sorted(self._pool.workers[each].assignment.rank for each in waiting if each in self._pool.workers)
        if ranks:
            text += f", while rank {', '.join(map(str, ranks))} waits in a collective"
        return text


def dump_stacks(workers: Sequence[WorkerHandle], reason: str) -> dict[str, str]:
    """Collect the Python stacks of running workers, log them, and return them by worker id."""
    asked = [worker for worker in workers if worker.is_running and worker.stacks_file]
    before = {worker.id: stacks_of(worker) for worker in asked}
    deaf = {worker.id: _blocking(worker) for worker in asked}
    for worker in asked:
        worker.process.send_signal(_linux.stack_signal(), to_group=False)
    found: dict[str, str] = {}
    until = time.monotonic() + _PATIENCE
    for worker in asked:
        found[worker.id] = _wait_for_dump(worker, before[worker.id], deaf[worker.id], until)
        log.error(
            "stacks of rank %d (pid %d), because %s:\n%s",
            worker.assignment.rank,
            worker.process.pid,
            reason,
            found[worker.id] or f"(no answer; process state: {_linux.process_state(worker.process.pid) or 'gone'})",
        )
    return found


def _step_of(report: bytes | None) -> str:
    """Return what the last report said, for a message."""
    if report is None:
        return " and has never reported any"
    step = parse_report(report).step
    return f" after step {step}" if step >= 0 else ""


def _is_stopped(worker: WorkerHandle) -> bool:
    return _linux.process_state(worker.process.pid) in ("T", "t")


def _blocking(worker: WorkerHandle) -> frozenset[int]:
    """Its threads that never take the signal."""
    state = _linux.signal_state(worker.process.pid, _linux.stack_signal())
    return state.blocking if state else frozenset()


def _wait_for_dump(worker: WorkerHandle, before: str, deaf: frozenset[int], until: float) -> str:
    """Return what the worker has added to its file: all of it, though it may be held up between any two lines.

    A thread that runs a signal's handler does not take the same signal: that shows when the handler is done. Where the
    kernel does not tell, a file that has stopped growing counts as complete.
    """
    text = before
    while time.monotonic() < until and worker.is_running and not _is_stopped(worker):
        last, text = text, stacks_of(worker)
        # Looked at before the state: a handler that has begun and is not there has ended.
        has_begun = text != before
        state = _linux.signal_state(worker.process.pid, _linux.stack_signal())
        if state is not None and not state.is_caught:
            break  # no Python, or not yet: nothing will be written
        if has_begun and (not (state.blocking - deaf) if state else text == last and not _linux.IS_LINUX):
            break
        time.sleep(0.02)
    return stacks_of(worker)[len(before) :]


def stacks_of(worker: WorkerHandle) -> str:
    """Return all that a worker has written to its file of stacks."""
    try:
        with open(worker.stacks_file, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@dataclass(frozen=True)
class Frame:
    """Holds one line of a stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.path.rpartition('/')[2]}:{self.line})"


def frames_of(dump: str) -> list[Frame]:
    """List the frames of the thread that wrote the dump, the innermost first.

    Only the thread that took the signal counts, which is the main thread unless a program blocks signals in it: other
    threads of a healthy worker wait for something all day long.

    >>> text = 'Thread 0x1:\\n  File "/a.py", line 1 in other\\n\\nCurrent thread 0x2 (most recent call first):\\n'
    >>> [str(frame) for frame in frames_of(text + '  File "/w/train.py", line 7 in step\\n')]
    ['step (train.py:7)']
    """
    own = dump.rpartition("Current thread ")[2].partition("\n\n")[0]
    found = [_FRAME.match(line) for line in own.splitlines()]
    return [Frame(m["path"], int(m["line"]), m["function"]) for m in found if m]


def is_in_collective(frames: list[Frame]) -> bool:
    """Return whether a worker waits for others: some frame belongs to the code that talks to other ranks."""
    return any(part in frame.path for frame in frames for part in _COLLECTIVES)
