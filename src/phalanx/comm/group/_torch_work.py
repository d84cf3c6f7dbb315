"""Gives torch the handles of what it starts on one of our groups: c10d works, with futures of the shapes gloo's have.

Owns the translation of our ``Work`` and of queued calls to ``torch.distributed.Work``. Python callers get an error as
it was raised, torch's C++ a future that fails.
"""

# mypy: disable-error-code="override"
# torch's stubs overload these methods with forms that c10d does not use to call a work.

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.transports._interface import Work as GroupWork
from phalanx.comm.transports._ordered import QueuedCall


class Finished(dist.Work):
    """A call that is over, and its outputs."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Queued(dist.Work):
    """A call that the group's thread will make."""

    def __init__(self, call: Callable[[], object], outputs: Any) -> None:
        super().__init__()
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        self.queued = _Announced(call, self._over)
        # An error that is raised in a continuation is the one way to a future that fails for C++ too.
        self._future = self._over.then(lambda _: self._outcome(outputs))

    def _outcome(self, outputs: Any) -> Any:
        self.queued.wait()
        return outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.queued.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self.queued.is_done()

    def is_success(self) -> bool:
        return self.queued.is_done() and self.queued.error is None

    def result(self) -> Any:
        return self._future.value()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Announced(QueuedCall):
    """Completes a future when it is over."""

    def __init__(self, call: Callable[[], object], over: torch.futures.Future[Any]) -> None:
        super().__init__(call)
        self._announce = over

    def run(self) -> None:
        super().run()
        self._announce.set_result(None)


class Exchange(dist.Work):
    """A send or recv under way; ``source`` is -1 until it is known."""

    def __init__(self, start: Callable[[Exchange], GroupWork], source: int) -> None:
        super().__init__()
        self.source = source
        self._work = start(self)

    def arrived(self, source: int) -> None:
        self.source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._work.is_done()

    def _source_rank(self) -> int:
        return self.source
