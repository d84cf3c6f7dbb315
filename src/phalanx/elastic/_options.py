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
from phalanx.storage import as_place


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How samples become batches.

    ``parts`` cuts each slot's batch into that many micro-batches (gradient accumulation inside a slot).
    ``num_workers`` loader processes read ahead; the samples' bits do not depend on it. They live as long as the job,
    each reading for its own slots; what the loop sets on the dataset between epochs starts them anew.
    ``shuffle="block"`` keeps reads local in blocks of ``block_size``, ``shuffle="shards"`` in the shards of a
    ``ShardedDataset``; ``order`` brings any other order (indices, a sampler, an ``Order`` of ``phalanx.data``), which
    then decides alone.

    >>> DataOptions(shuffle="block", block_size=4096).block_size
    4096
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    shuffle: bool | Literal["block", "shards"] = True
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
    """Where and how often the job's state goes to disk. A SIGTERM to all workers saves too.

    >>> Saves("s3://bucket/run", every=100).keep          # doctest: +SKIP
    3
    """

    directory: str | Path = field(kw_only=False)
    """A folder, or a URL: ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://`` (the extra ``[cloud]``)."""
    every: int | None = None
    """Steps between saves; None: only on SIGTERM and ``Job.save``."""
    keep: int = 3
    """How many readable saves stay; the newest readable one is never removed."""
    secret: bytes | None = field(default=None, repr=False)
    """Signs saves and refuses those that are not signed with it; None: PHALANX_CHECKPOINT_SECRET, b"": no secret."""

    local: str | Path | None = None
    """With a URL: the folder of this machine in which saves are made before they are uploaded in the background, and to
    which they are brought; None: in the system's place for temporary files."""

    verify: bool = True
    """Read every save back from the disk before it counts as one, in the background, and compare it with what was to be
    written; what differs is told, and written again. With a URL: before it is uploaded."""

    def __post_init__(self) -> None:
        is_folder = isinstance(as_place(self.directory), Path)
        if self.local is not None and is_folder:
            raise ValueError(
                f"local is {str(self.local)!r}, but the saves' directory {self.directory} is no bucket's URL"
            )
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
    overlap: bool = False
    """Send gradients to the other workers while the backward pass of a worker's last slot goes on, instead of after it.
    The result has the same bits. It pays where sending takes long beside computing: between machines. On one machine
    whose cores all compute it does not. Gradients may then be changed after ``step.reduce()`` only."""
    balance: bool = True
    """Give slots of slow workers to fast ones, as measured over some steps, where that shortens steps by a tenth or
    more. The result has the same bits."""
    verify: bool = False
    """Compare the digests of all workers at every regroup; costs one pass over the state."""
    begin_again: bool = False
    """Begin again at step 0 when all workers were lost and the job has no saves, instead of failing."""
    hold: float = timeouts.HOLD
    """Seconds that a worker whose script has ended stays, with a copy of the final state, for the scripts of the others
    to end: a worker that dies after the last step is replaced by one that takes this state and runs what follows the
    loop. 0: nobody stays or keeps a copy, and such a death fails the job."""
    leave_signals: tuple[str, ...] | None = None
    """Names of signals that ask a worker to leave at its next step boundary; (): none does. None: SIGTERM, and the one
    by which its agent asks (``--leave-signal``)."""
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
    on_writer: Callable[[str], None] | None = None
    """Told the id of the worker that writes from now on (``Job.is_writer``), because the one before is gone."""
