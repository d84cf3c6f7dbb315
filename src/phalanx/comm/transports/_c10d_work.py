"""Waits for operations of a c10d backend in slices, and does what is left to do when one is done.

Owns the handles that ``C10dTransport`` gives out; the transport says why a group ended. A peer that exits after its
last collective must not fail an operation that is about to finish, also where a third one is slow to do its part:
death seen by the watcher fails the operation in flight only after ``_GRACE``, and the next one at once. Who waits for
the dead rank itself, or for one that gave up because of it, does not wait that long: a connection closes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.comm import _background as background
from phalanx.comm.transports._interface import Arrived, Work

if TYPE_CHECKING:
    from phalanx.comm.transports._c10d import C10dTransport

SLICE = timedelta(milliseconds=20)
_GRACE = 0.7  # every survivor is to know within a second


class C10dWork(Work):
    """A c10d operation under way, with what is left to do when it is done."""

    def __init__(self, transport: C10dTransport, inner: Any, after: Callable[[], object] | None = None) -> None:
        self._transport = transport
        self._inner = inner
        self._after = after
        self.arrived: Arrived | None = None
        """Called with the rank that a message came from, where any could."""
        self._finished = False

    def detach(self) -> Any:
        """Let go of the operation (its memory keeps the connections open); ``wait`` raises the cause from now on."""
        inner, self._inner = self._inner, None
        return inner

    def is_done(self) -> bool:
        inner = self._inner
        return self._finished or inner is None or inner.is_completed()

    def wait(self, timeout: float | None = None) -> None:
        if self._finished:
            return
        transport = self._transport
        inner = self._inner
        if inner is None:
            transport._check_alive()
            raise transport._fail(None)
        ran_out = False
        try:
            if transport._sliced:
                ran_out = not self._wait_sliced(inner, timeout)
            else:
                inner.wait()
        except RuntimeError as error:
            if not transport._failures.is_fault(error):
                raise
            # Whatever still refers to the operation keeps its connections open and the peers waiting.
            inner = self._inner = error.__traceback__ = None
            raise transport._fail(error) from error
        if ran_out:  # of the caller's time only: the operation goes on, and so does the group
            assert timeout is not None
            raise transport._failures.timed_out(timeout)
        self._finished = True
        if self.arrived is not None:
            self.arrived(inner._source_rank())
        self._inner = None
        transport._pending.discard(self)
        if self._after is not None:
            after, self._after = self._after, None
            after()

    def _wait_sliced(self, inner: Any, timeout: float | None) -> bool:
        """Return whether the operation ended before the caller's ``timeout``."""
        transport = self._transport
        # gloo ends the operation by itself after the group's timeout; ours is a backstop behind it.
        deadline = time.monotonic() + (transport._timeout + 2.0 if timeout is None else timeout)
        while True:
            try:
                inner.wait(SLICE)
                return True
            except RuntimeError as caught:
                error = caught.with_traceback(None)
            if inner.is_completed():
                inner.wait(SLICE)  # it may have succeeded just after the slice ended
                return True
            now = time.monotonic()
            dead_since = transport._dead_since
            if transport._failures.cause is not None or (dead_since is not None and now - dead_since > _GRACE):
                raise error
            if now > deadline:
                if timeout is None:
                    raise error
                return False


class PointToPoint:
    """A gloo send or receive, waited for in a thread.

    A wait of gloo's that times out on these closes every connection of the group, so it cannot be cut into slices;
    and an operation whose handle is dropped is cancelled. The thread keeps the handle and waits once.
    """

    def __init__(self, inner: Any) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._over: Any = None
        background.start(lambda: self._run(inner), "phalanx-p2p", on_failure=self._fail)

    def _run(self, inner: Any) -> None:
        inner.wait()
        self._over = inner
        self._done.set()

    def _source_rank(self) -> int:
        """Return where a message from any rank came from; only when it is there."""
        return int(self._over._source_rank())

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("operation timed out")
        if self._error is not None:
            raise self._error


class Several(Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work], after: Callable[[], object] | None = None) -> None:
        self._works = works
        self._after = after

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout)
        if self._after is not None:
            after, self._after = self._after, None
            after()

    def is_done(self) -> bool:
        return all(work.is_done() for work in self._works)


def all_of(works: Sequence[Work], async_op: bool) -> Work:
    several = Several(works)
    if not async_op:
        several.wait()
    return several
