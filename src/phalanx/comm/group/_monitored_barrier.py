"""Finds out which ranks do not come: a barrier for debugging, slower than the plain one.

Rank 0 hears from every rank and tells every one who did not come, so all that came raise the same error. They wait
twice as long as rank 0 does: it may have come last. A barrier that fails ends the group, as every failure does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from phalanx.comm.transports._interface import Work
from phalanx.errors import PeerTimeout

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group

_TAG = (1 << 29) + 17


def monitored_barrier(group: Group, seconds: float) -> None:
    """Return when all ranks have called it, or raise ``PeerTimeout`` with those that have not."""
    if seconds <= 0:
        raise ValueError(f"rank {group.rank}: monitored_barrier with timeout {seconds}; expected seconds above 0")
    missing = _hear(group, seconds) if group.rank == 0 else _ask(group, seconds)
    if missing:
        error = PeerTimeout(
            f"rank {group.rank}: ranks {list(missing)} of {group.size} did not reach the monitored barrier within "
            f"{seconds:g} s; look at where they are, or raise the timeout",
            generation=group.generation,
            ranks=missing,
        )
        group.abort(error)
        raise error


def _hear(group: Group, seconds: float) -> tuple[int, ...]:
    """Rank 0: the ranks that did not come, told to all that did."""
    deadline = time.monotonic() + seconds
    others = range(1, group.size)
    came = {rank: group.recv(torch.empty(1), rank, _TAG, async_op=True) for rank in others}
    missing = tuple(rank for rank, work in came.items() if not _ends(work, deadline))
    verdict = torch.tensor([float(rank in missing) for rank in range(group.size)])
    for work in [group.send(verdict, rank, _TAG, async_op=True) for rank in others if rank not in missing]:
        work.wait(seconds)
    return missing


def _ask(group: Group, seconds: float) -> tuple[int, ...]:
    """Return what rank 0 says, or that it says nothing."""
    deadline = time.monotonic() + 2 * seconds
    verdict = torch.zeros(group.size)
    answer = group.recv(verdict, 0, _TAG, async_op=True)
    group.send(torch.ones(1), 0, _TAG, async_op=True)
    if not _ends(answer, deadline):
        return (0,)
    return tuple(torch.nonzero(verdict).view(-1).tolist())


def _ends(work: Work, deadline: float) -> bool:
    try:
        work.wait(max(0.001, deadline - time.monotonic()))
    except PeerTimeout:
        if work.is_done():  # the group's own timeout, which ended it
            raise
        return False
    return True
