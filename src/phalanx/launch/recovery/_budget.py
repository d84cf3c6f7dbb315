"""Counts failures in time, and by node: whether restarts are left, and which node fails again and again. Pure.

Owns the list of failures that used up restarts, which travels with the recoveries (``Recovery.failures``), so that all
agents count alike. Deaths that were announced (notices, polite leaves) and lost nodes are never in it. Times are
those of the agent that proposed the recovery, in seconds since 1970; machines whose clocks differ by less than the
window count right enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NODE_FAILURES = 3
"""Failures in a row on one node, and none on another in between, after which it is left out."""

NODE_WINDOW = 3600.0
"""Seconds in which they have to be: three failures in a month say nothing of a node."""

NOBODY = "-"
"""In the place of a node, for a failure that is no single node's: contact that was lost."""

_KEPT = 16
"""Of failures that no window asks for."""


@dataclass(frozen=True)
class Failure:
    """One failure that used up a restart."""

    time: float
    node: str


def parse_failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """Read the list; what is none of ours is left out.

    >>> parse_failures(["12.5 node1", "soon node1", ""])
    (Failure(time=12.5, node='node1'),)
    """
    found = []
    for text in texts:
        time, _, node = text.partition(" ")
        try:
            seconds = float(time)
        except ValueError:
            continue
        if node and math.isfinite(seconds):
            found.append(Failure(seconds, node))
    return tuple(found)


def dump_failures(failures: Sequence[Failure], max_restarts: int) -> tuple[str, ...]:
    """Write the list, without those that no decision can ask for any more."""
    return tuple(f"{failure.time:.3f} {failure.node}" for failure in failures[-max(max_restarts, _KEPT) :])


def used(failures: Sequence[Failure], total: int, window: float, now: float) -> int:
    """Return how many restarts are used up: all of them, or with a window (seconds; 0: none) those inside of it.

    >>> failures = [Failure(0.0, "a"), Failure(50.0, "a"), Failure(90.0, "b")]
    >>> used(failures, 3, 0.0, 100.0), used(failures, 3, 60.0, 100.0)
    (3, 2)
    """
    return total if window <= 0 else sum(failure.time > now - window for failure in failures)


def next_free(failures: Sequence[Failure], window: float, now: float) -> float:
    """Return the seconds until one of the restarts inside the window is free again; 0 where none is used."""
    inside = [failure.time for failure in failures if failure.time > now - window]
    return max(0.0, min(inside) + window - now) if inside else 0.0


def failing_node(failures: Sequence[Failure], now: float) -> str:
    """Return the node on which workers die again and again; empty if there is none.

    >>> failing_node([Failure(1.0, "a"), Failure(2.0, "b"), Failure(3.0, "b"), Failure(4.0, "b")], 5.0)
    'b'
    """
    last = failures[-NODE_FAILURES:]
    if len(last) < NODE_FAILURES or last[0].time <= now - NODE_WINDOW or len({f.node for f in last}) > 1:
        return ""
    return last[0].node if last[0].node != NOBODY else ""
