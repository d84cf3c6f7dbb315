"""Shows every collective to observers: the hook that debug tools, metrics, fault scripts and tests share.

Owns the list of observers and the event they get. ``Group`` looks at ``_observers`` before it builds an event, so that
nothing is paid while nobody looks. An observer made inside a simulated rank sees that rank's events only; one made
elsewhere sees those of the whole process. Observers run in the thread that calls the collective, before it starts;
what they raise goes to the caller (this is how scripted faults work).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx.comm.group import _context

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group

_PACKAGE = str(Path(__file__).parents[1])

Observer = Callable[["CommEvent"], None]


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective that is about to start on this rank."""

    name: str
    """The method of ``Group``, e.g. ``all_reduce``."""
    nbytes: int
    """Bytes of the larger of what goes in and what comes out on this rank."""
    group: Group
    op: str = ""
    """The reduction, where there is one."""

    def caller(self) -> str:
        """``file:line`` of the code that called into ``phalanx.comm``; ask inside the observer."""
        frame = sys._getframe(1)
        entered = False
        while frame is not None:
            inside = frame.f_code.co_filename.startswith(_PACKAGE)
            if entered and not inside:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            entered = entered or inside
            frame = frame.f_back  # type: ignore[assignment]  # typeshed: f_back is optional, the loop tests it
        return "?"


# The registrations: (rank token or None, callback, tally); one of the last two is None. Replaced as a whole, never
# changed in place, so that reading needs no lock. Module state on purpose: "is anybody looking" must cost one load.
_observers: tuple[tuple[object | None, Observer | None, dict[str, int] | None], ...] = ()


@contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """Call ``callback`` with a ``CommEvent`` for every collective started inside the block.

    >>> events = []
    >>> with observe(events.append):       # doctest: +SKIP
    ...     group.all_reduce(tensor)
    >>> events[0].name, events[0].nbytes   # doctest: +SKIP
    ('all_reduce', 4096)
    """
    with _registered(callback, None):
        yield


@contextmanager
def tally_bytes(tally: dict[str, int]) -> Iterator[None]:
    """Add the bytes of every collective started inside the block to ``tally``, by its name.

    The same as an observer that adds up ``nbytes``, at a third of its cost: a job that is watched does it all the time.
    """
    with _registered(None, tally):
        yield


@contextmanager
def _registered(callback: Observer | None, tally: dict[str, int] | None) -> Iterator[None]:
    global _observers
    entry = (_context.rank_token(), callback, tally)
    with _context.registry_lock:
        _observers = (*_observers, entry)
    try:
        yield
    finally:
        with _context.registry_lock:
            _observers = tuple(other for other in _observers if other is not entry)


def emit(group: Group, name: str, sides: Sequence[Tensor | Sequence[Tensor]], op: str) -> None:
    """Tell the observers; only called when there are some."""
    nbytes = _nbytes(sides[0]) if len(sides) == 1 else max(map(_nbytes, sides), default=0)
    event: CommEvent | None = None
    for token, callback, tally in _observers:
        if token is not None and token is not group.rank_token:
            continue
        if tally is not None:
            tally[name] = tally.get(name, 0) + nbytes
        elif callback is not None:
            event = event or CommEvent(name, nbytes, group, op)
            callback(event)


def _nbytes(side: Tensor | Sequence[Tensor]) -> int:
    if type(side) is Tensor or isinstance(side, Tensor):  # torch's own test of an instance is a slow one
        return side.nbytes
    return sum(tensor.nbytes for tensor in side)
