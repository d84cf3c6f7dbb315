"""What a user can choose about a job beyond its model and data: values, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.comm import Group


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How samples become batches.

    ``parts`` cuts each slot's batch into that many micro-batches (gradient accumulation inside a slot).
    ``num_workers`` loader processes read ahead; the samples' bits do not depend on it.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    shuffle: bool | Literal["block"] = True
    tail: Literal["uneven", "drop"] = "uneven"
    parts: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts is {self.parts}; expected at least 1")
        if self.tail not in ("uneven", "drop"):
            raise ValueError(
                f"tail is {self.tail!r}; expected 'uneven' or 'drop': a job never repeats samples"
            )


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
    timeout: float = 300.0
    """Seconds that a collective may wait for a peer that lives but does not come."""
    verify: bool = False
    """Compare the digests of all workers at every regroup; costs one pass over the state."""
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
