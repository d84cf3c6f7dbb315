"""Keeps which group is the current one: per simulated rank where there is one, else per process.

Owns the two registrations behind ``current_group`` and ``use_group``. Module state on purpose: a default group is
what lets samplers, meshes and modules be written without passing a group through every call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group

registry_lock = threading.Lock()


class RankToken(Protocol):
    """Stands for a simulated rank; fault scripts end or stop it through this."""

    def die(self) -> None: ...

    def hang(self) -> None: ...


class _RankLocal(threading.local):
    token: RankToken | None = None
    group: Group | None = None


class _Process:
    group: Group | None = None


_rank = _RankLocal()
_process = _Process()


def rank_token() -> RankToken | None:
    """Return what stands for the simulated rank that this thread belongs to; None in a real process."""
    return _rank.token


def enter_rank(token: RankToken) -> None:
    """Make this thread act for a simulated rank (also threads that a rank starts for itself)."""
    _rank.token = token


def registered_group() -> Group | None:
    if _rank.token is not None:
        return _rank.group
    return _process.group


@contextmanager
def use_group(group: Group | None) -> Iterator[Group | None]:
    """Make ``group`` the current one inside the block, for this simulated rank or for the whole process.

    >>> with use_group(group):             # doctest: +SKIP
    ...     mesh = init_device_mesh("cpu", (2, 2))
    """
    previous = set_group(group)
    try:
        yield group
    finally:
        set_group(previous)


def set_group(group: Group | None) -> Group | None:
    """Replace the current group and return the one before."""
    holder = _rank if _rank.token is not None else _process
    previous, holder.group = holder.group, group
    return previous
