"""Plays faults by script: die, hang, be late, raise or lose a result at a chosen rank and step, to test what survives.

Owns the scripts; they act through ``observe``, so they need no support from the code under test. A step is the
n-th collective (counted per rank, from 0) that the rank issues inside the block, or of the given name only.
In a simulation ``kill`` and ``hang`` act on the simulated rank, in a real process on the process itself.

>>> with play(fail_at(rank=1, step=3)):            # doctest: +SKIP
...     train(group)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.comm.group import _context
from phalanx.comm.group._observe import CommEvent, observe
from phalanx.comm.transports._interface import Work
from phalanx.errors import PeerLost, PhalanxError

__all__ = [
    "Fault",
    "InjectedFailure",
    "delay_at",
    "fail_at",
    "hang_at",
    "kill_at",
    "lose_result_at",
    "play",
]


class InjectedFailure(PhalanxError, RuntimeError):
    """What ``fail_at`` raises."""


@dataclass(frozen=True)
class Fault:
    """``act`` when ``rank`` issues collective number ``step`` (of that ``name``; empty: of any)."""

    rank: int
    step: int
    act: Callable[[CommEvent], None]
    name: str = ""


def fail_at(rank: int, step: int, *, name: str = "") -> Fault:
    """Raise ``InjectedFailure`` in the rank."""

    def act(event: CommEvent) -> None:
        raise InjectedFailure(f"rank {rank} was told to fail at collective {step} ({event.name})")

    return Fault(rank, step, act, name)


def kill_at(rank: int, step: int, *, name: str = "") -> Fault:
    """Kill the rank as SIGKILL does."""

    def act(event: CommEvent) -> None:
        token = _context.rank_token()
        if token is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            token.die()

    return Fault(rank, step, act, name)


def hang_at(rank: int, step: int, *, name: str = "") -> Fault:
    """Stop the rank as SIGSTOP does."""

    def act(event: CommEvent) -> None:
        token = _context.rank_token()
        if token is None:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            token.hang()

    return Fault(rank, step, act, name)


def delay_at(rank: int, step: int, seconds: float, *, name: str = "") -> Fault:
    """Make the rank late."""
    return Fault(rank, step, lambda event: time.sleep(seconds), name)


def lose_result_at(rank: int, step: int, *, name: str = "") -> Fault:
    """Let the rank take part and then lose contact: its peers have the collective's result, it gets ``PeerLost``.

    This is what a peer's death at the end of a collective may look like; by chance it is hardly ever met.
    """

    def act(event: CommEvent) -> None:
        group: Any = event.group
        group._transport = _LosingResult(group, group._transport)  # for the one call that is about to begin

    return Fault(rank, step, act, name)


class _LosingResult:
    """Stands in for a group's transport during one call."""

    def __init__(self, group: Any, transport: Any) -> None:
        self._group = group
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._transport, name)
        if name in ("name", "rank", "size", "abort", "close"):
            return method

        def call(*args: Any, **keywords: Any) -> Work:
            method(*args, **keywords).wait()
            group = self._group
            group._transport = self._transport
            error = PeerLost(
                f"rank {group.rank} was told to lose contact at the end of {name}",
                generation=group.generation,
            )
            group.abort(error)
            raise error

        return call


@contextmanager
def play(*faults: Fault) -> Iterator[None]:
    """Let the faults happen inside the block."""
    counts: dict[tuple[int, str], int] = {}

    def watch(event: CommEvent) -> None:
        rank = event.group.ranks[event.group.rank]
        due = [fault for fault in faults if fault.rank == rank and fault.name in ("", event.name)]
        for fault in due:
            key = (rank, fault.name)
            if counts.get(key, 0) == fault.step:
                _count(counts, rank, event.name)
                fault.act(event)
                return
        _count(counts, rank, event.name)

    with observe(watch):
        yield


def _count(counts: dict[tuple[int, str], int], rank: int, name: str) -> None:
    for key in ((rank, ""), (rank, name)):
        counts[key] = counts.get(key, 0) + 1
