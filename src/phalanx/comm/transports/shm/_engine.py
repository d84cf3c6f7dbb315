"""Runs collectives: in order, by whoever waits for them, or by one background thread.

Guarantees
    A collective is a generator that moves bytes and yields a token ("word i must reach n") when it cannot go on. Tasks
    of one *lane* run strictly one after the other: all collectives share a lane, sends to each peer have one, and
    receives from each peer with each tag, so that an exchange of sends never blocks itself. A synchronous call with
    nothing else under way is run by its caller at once. The first failure ends the transport: every call raises it from
    then on and peers are told. A wait that gets no nearer for ``timeout`` seconds is ``PeerTimeout``.

Waiting
    About 20 polls, 20 ``sched_yield``, then naps on this rank's BELL: the sleeper reads the bell, marks itself ASLEEP,
    looks again, and sleeps while the bell is unchanged; who moves a flag rings the bells of those asleep. A ring that
    is missed (see ``_syscalls``) costs one nap: 0.2 ms, then 2 ms, then 10 ms. A peer's death rings too (``_peers``).
    After each nap deaths and states are looked at; an idle rank uses well under 1% of a core.

Assumptions
    One transport's collectives are called from one thread at a time (as ``Group`` sees to); ``abort`` from any.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Generator

from phalanx.comm._background import Background
from phalanx.comm.transports._interface import Work
from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm._peers import Peers
from phalanx.comm.transports.shm._segment import Segment
from phalanx.comm.transports.shm._segment_layout import TOKEN_MASK, TOKEN_SHIFT
from phalanx.comm.transports.shm._syscalls import fence, futex_wait, futex_wake
from phalanx.errors import CommError, GroupAborted, PeerTimeout

Steps = Generator[int, None, None]
"""A collective under way; each item is a token."""

AnySteps = Generator["int | tuple[int, ...]", None, None]
"""Steps that also yield several tokens, of which one will do, as negative numbers; only ``submit`` takes them."""

_POLLS = 20
_YIELDS = 20


def nap_length(naps: int) -> float:
    """Seconds to sleep after ``naps`` fruitless naps."""
    if naps < 2:
        return 0.0002
    return 0.002 if naps < 50 else 0.010


class Lane:
    """Tasks that run one after the other; who holds ``lock`` moves the first one on."""

    __slots__ = ("lock", "tasks")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tasks: deque[Task] = deque()


class Task(Work):
    """One queued collective, and the caller's handle on it."""

    __slots__ = ("_engine", "done", "error", "lane", "steps", "token")

    def __init__(self, engine: Engine, lane: Lane, steps: Steps | AnySteps) -> None:
        self._engine = engine
        self.lane = lane
        self.steps: Steps | AnySteps | None = steps
        self.token: int | tuple[int, ...] = 0
        self.done = False
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self._engine.finish(self, timeout)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def is_done(self) -> bool:
        if not self.done:
            self._engine.pump()
        return self.done


class Engine:
    """Drives the lanes of one transport over one segment."""

    def __init__(self, segment: Segment, peers: Peers, timeout: float, *, threaded: bool) -> None:
        layout, rank = segment.layout, segment.rank
        self.segment = segment
        self.words = segment.words
        self.timeout = timeout
        self.yields = _YIELDS
        self.error: BaseException | None = None
        self._peers = peers
        self._rank = rank
        self._threaded = threaded
        self._thread: Background | None = None
        self._work_there = threading.Event()
        self.lanes: list[Lane] = []
        self.collective = self.lane()
        self._queue_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._queued = 0
        block = layout.block(rank)
        self._asleep = block + L.ASLEEP
        self._bell = (block + L.BELL) * 2
        self._bell_address = segment.address + (block + L.BELL) * 8
        peers.wake_with(self.wake)
        self._sleepers = [
            (layout.block(r) + L.ASLEEP, (layout.block(r) + L.BELL) * 2) for r in range(layout.size) if r != rank
        ]

    def lane(self) -> Lane:
        lane = Lane()
        self.lanes.append(lane)
        return lane

    # --- flags ---

    def raise_flag(self, index: int, value: int) -> None:
        """Publish a sequence number: what was written before is visible to whoever sees it. Wakes sleepers."""
        if fence is not None:
            fence()
        words = self.words
        words[index] = value
        for asleep, bell in self._sleepers:
            if words[asleep]:
                self._ring(asleep, bell)

    def wake_if_asleep(self) -> None:
        if self.words[self._asleep]:
            self.wake()

    def wake(self) -> None:
        """Wake this rank's own sleeping threads."""
        self._ring(self._asleep, self._bell)

    def _ring(self, asleep: int, bell: int) -> None:
        self.words[asleep] = 0
        bells = self.segment.bells
        bells[bell] = (bells[bell] + 1) & 0x7FFFFFFF
        futex_wake(self.segment.address + bell * 4)

    # --- running ---

    def run(self, lane: Lane, steps: Steps) -> None:
        """Run a synchronous call to its end, after everything that was queued before it in its lane."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._queued or not lane.lock.acquire(blocking=False):
            self.submit(lane, steps).wait()
            return
        try:
            words = self.words
            for token in steps:
                index, target = token & TOKEN_MASK, token >> TOKEN_SHIFT
                for _ in range(_POLLS):
                    if words[index] >= target:
                        break
                else:
                    self._wait_for((token,), yields=self.yields)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            lane.lock.release()

    def submit(self, lane: Lane, steps: Steps | AnySteps) -> Task:
        """Queue a call. With a background thread it goes on by itself, else whenever its handle is asked."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        task = Task(self, lane, steps)
        with self._queue_lock:
            self._queued += 1
            lane.tasks.append(task)
        if self._threaded:
            if self._thread is None:
                self._thread = Background(self._serve, "phalanx-shm", on_failure=self.fail, attempts=1)
                self._thread.start()
            self._work_there.set()
            self.wake_if_asleep()  # it may nap over another lane
        else:
            self.pump()
        return task

    def pump(self) -> list[int]:
        """Move every lane on as far as it goes without waiting; the tokens that the lanes are stuck at."""
        stuck: list[int] = []
        for lane in self.lanes:
            if lane.tasks and lane.lock.acquire(blocking=False):
                try:
                    while lane.tasks and self._advance(lane.tasks[0]):
                        self._retire(lane)
                    if lane.tasks:
                        token = lane.tasks[0].token
                        stuck += (token,) if isinstance(token, int) else token
                finally:
                    lane.lock.release()
        return stuck

    def _retire(self, lane: Lane) -> None:
        with self._queue_lock:
            lane.tasks.popleft()
            self._queued -= 1

    def _advance(self, task: Task) -> bool:
        """Run a task until it would wait; True when it is over, well or not."""
        if self.error is not None:
            task.error = self.error
        words = self.words
        while task.error is None and task.steps is not None:
            token = task.token
            if isinstance(token, int) and words[token & TOKEN_MASK] < token >> TOKEN_SHIFT:
                return False
            try:
                task.token = next(task.steps)
                if not isinstance(task.token, int):  # it has looked at all of them: once for each call of this
                    return False
            except StopIteration:
                break
            except BaseException as error:  # kept for the caller of wait(), whatever it is
                task.error = self.fail(error)
        task.steps = None  # frees the tensors that the generator holds
        task.done = True
        return True

    def finish(self, task: Task, timeout: float | None) -> None:
        """Help until the task is over. A timeout given by the caller harms nothing: waiting again is allowed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not task.done:
            stuck = tuple(self.pump())
            if task.done:
                return
            try:
                if stuck:
                    self._wait_for(stuck, yields=self.yields, deadline=deadline, task=task)
                elif task.lane.lock.acquire(timeout=0.002):  # another thread is at it
                    task.lane.lock.release()
                elif deadline is not None:
                    self._look_around((), deadline)
            except CommError as error:
                if self.error is None and deadline is not None and time.monotonic() >= deadline:
                    raise
                self.fail(error)

    def _serve(self) -> None:
        """Run in the background thread: never spins, since it would hold up the interpreter."""
        while self.error is None:
            self._work_there.wait()
            self._work_there.clear()
            while self._queued and self.error is None:
                stuck = tuple(self.pump())
                try:
                    if stuck:
                        self._wait_for(stuck, yields=0)
                    elif self._queued:  # the caller is at it
                        self._work_there.wait(0.001)
                except BaseException as error:
                    self.fail(error)
        self.pump()

    # --- waiting ---

    def _ready(self, tokens: tuple[int, ...]) -> bool:
        words = self.words
        return any(words[abs(token) & TOKEN_MASK] >= abs(token) >> TOKEN_SHIFT for token in tokens)

    def _wait_for(
        self, tokens: tuple[int, ...], *, yields: int, deadline: float | None = None, task: Task | None = None
    ) -> None:
        """Return when one of the tokens has come (or may have); raise when that cannot be any more."""
        for _ in range(yields):
            if self._ready(tokens) or (task is not None and task.done):
                return
            os.sched_yield()
        limit = time.monotonic() + self.timeout
        naps = 0
        while not self._ready(tokens):
            if task is not None and task.done:
                return
            self._look_around(tokens, limit if deadline is None else min(limit, deadline))
            bell = self.segment.bells[self._bell]
            self.words[self._asleep] = 1
            if not self._ready(tokens):
                futex_wait(self._bell_address, bell, nap_length(naps))
            naps += 1

    def _look_around(self, tokens: tuple[int, ...], limit: float) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        layout = self.segment.layout
        awaited = {layout.writer(abs(token) & TOKEN_MASK) for token in tokens}
        loss = self._peers.loss(self.segment, tokens)
        if self._ready(tokens):  # it came before its sender went
            return
        if loss is not None:
            raise loss
        if time.monotonic() >= limit:
            names = ", ".join(f"rank {r} (pid {self._peers.pids[r]})" for r in sorted(awaited))
            raise PeerTimeout(
                f"rank {self._rank}: {names or 'some rank'} of generation {self._peers.generation} did not take part "
                f"in time (the group's timeout is {self.timeout:g} s); it may hang",
                generation=self._peers.generation,
                ranks=tuple(sorted(awaited)),
            )

    # --- ending ---

    def fail(self, error: BaseException) -> BaseException:
        """End the transport with the first error and tell the peers; returns the error that counts."""
        if self.end_with(error):
            self.leave(L.FAILED)
            self._peers.close()
            self._work_there.set()
        assert self.error is not None, "whoever came first has set it"
        return self.error

    def end_with(self, error: BaseException) -> bool:
        """Make ``error`` what every call raises from now on, unless there is one: whether it was the first."""
        if not isinstance(error, CommError):
            cause, error = error, GroupAborted(f"a collective of rank {self._rank} broke off: {error!r}")
            error.__cause__ = cause
        with self._end_lock:  # a caller and the background thread see a death in the same moment
            if self.error is not None:
                return False
            self.error = error
            return True

    def leave(self, state: int) -> None:
        """Say that this rank takes no further part, and wake everybody who sleeps, here and elsewhere."""
        layout = self.segment.layout
        index = layout.block(self._rank) + L.STATE
        if self.words[index] == L.OPEN:
            self.words[index] = state
        for rank in range(layout.size):
            block = layout.block(rank)
            self._ring(block + L.ASLEEP, (block + L.BELL) * 2)

    def join_thread(self) -> None:
        thread = self._thread
        if thread is not None and not thread.is_current:
            self._work_there.set()
            thread.join(30.0)
