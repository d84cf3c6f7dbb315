"""Makes futures whose work is done by whoever waits: deterministic, and on the thread that trains.

A ``Work`` of a group becomes a ``torch.futures.Future`` that hooks can chain with ``then``. Callbacks run when the
result is asked for, in the order in which the reducer asks: bucket by bucket, the same on every rank. So a hook whose
callbacks start further collectives keeps these in the same order everywhere, which callbacks on a transport's own
threads could not promise. As with torch's futures, a callback runs after a failure too, and finds it when it asks for
the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.comm import Work

T = TypeVar("T")


class LazyFuture(torch.futures.Future):  # type: ignore[type-arg]  # its generic form exists for type checkers only
    """A future that computes its value on the first ``wait`` (or ``value``)."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute: Callable[[], Any] | None = compute
        self._callbacks: list[Callable[[Any], None]] = []

    def _run(self) -> None:
        """Compute once. What that raises is kept: ``wait`` and ``value`` raise it, here and in callbacks."""
        compute, self._compute = self._compute, None
        if compute is None:
            return
        try:
            result = compute()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(result)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def wait(self) -> Any:
        self._run()
        return super().wait()

    def value(self) -> Any:
        self._run()
        return super().value()

    def done(self) -> bool:
        return self._compute is None

    def then(self, callback: Callable[[Any], Any]) -> LazyFuture:
        def compute() -> Any:
            self._run()
            return callback(self)

        return LazyFuture(compute)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)


def future_of(work: Work, value: Any) -> LazyFuture:
    """Return a future that waits for ``work`` and then holds ``value``."""

    def compute() -> Any:
        work.wait()
        return value

    return LazyFuture(compute)


def finished(value: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that holds ``value`` already."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future
