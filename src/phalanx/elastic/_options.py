"""Holds what a user can choose about a job beyond its model and data: values, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.comm import Group
from phalanx.data._source import check_shuffle
from phalanx.data._wrapped_orders import OrderLike
from phalanx.protocol import timeouts


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How samples become batches.

    ``parts`` cuts each slot's batch into that many micro-batches (gradient accumulation inside a slot).
    ``num_workers`` loader processes read ahead; the samples' bits do not depend on it.
    ``shuffle="block"`` keeps reads local in blocks of ``block_size``; ``order`` brings any other order (indices, a
    sampler, an ``Order`` of ``phalanx.data``), which then decides alone.

    >>> DataOptions(shuffle="block", block_size=4096).block_size
    4096
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    shuffle: bool | Literal["block"] = True
    tail: Literal["uneven", "drop"] = "uneven"
    parts: int = 1
    order: OrderLike | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts is {self.parts}; expected at least 1")
        check_shuffle(self.shuffle, self.order, self.block_size)
        if self.tail not in ("uneven", "drop"):
            raise ValueError(f"tail is {self.tail!r}; expected 'uneven' or 'drop': a job never repeats samples")


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Where and how often the job's state goes to disk. A SIGTERM to all workers saves too."""

    directory: str | Path
    every: int | None = None
    """Steps between saves; None: only on SIGTERM and ``Job.save``."""
    keep: int = 3
    """How many readable saves stay; the newest readable one is never removed."""
    secret: bytes | None = field(default=None, repr=False)
    """Signs saves and refuses those that are not signed with it; None: PHALANX_CHECKPOINT_SECRET, b"": no secret."""

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.every is not None and self.every < 1):
            raise ValueError(f"every is {self.every} and keep {self.keep}; expected at least 1")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the job runs here."""

    log_dir: str | Path | None = None
    """Directory for events and the audit log, JSON lines, one file of each per worker."""
    progress: bool = True
    """A live line on a terminal, plain lines elsewhere; on the first worker only."""
    threads: int | None = None
    """Set torch's number of threads: equal bits need equal threads on all workers."""
    timeout: float = timeouts.COLLECTIVE
    """Seconds that a collective may wait for a peer that lives but does not come."""
    verify: bool = False
    """Compare the digests of all workers at every regroup; costs one pass over the state."""
    begin_again: bool = False
    """Begin again at step 0 when all workers were lost and the job has no saves, instead of failing."""
    hold: float = timeouts.HOLD
    """Seconds that a worker whose script has ended stays, with a copy of the final state, for the scripts of the others
    to end: a worker that dies after the last step is replaced by one that takes this state and runs what follows the
    loop. 0: nobody stays or keeps a copy, and such a death fails the job."""
    group: Group | None = None
    """Run on this fixed group instead of the one that the environment names."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """What ``on_regroup`` is told."""

    generation: int
    round: int
    workers: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    step: int
    seconds: float
    """From the moment this worker noticed to the moment it could go on."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Called in every worker, between steps, after the group has formed anew."""

    on_regroup: Callable[[Regrouped], None] | None = None
    on_newcomer: Callable[[str], None] | None = None
    on_leave: Callable[[str], None] | None = None
