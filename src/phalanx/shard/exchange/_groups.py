"""Finds which group a sharded tensor lives on, and which rank of it a placement means.

Owns ``load_with_process_group`` and the translation of what users pass: a ``Group``, a c10d process group, what torch
gives to a rank outside of one, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from phalanx._torch_private import NON_GROUP_MEMBER
from phalanx.comm import Group, current_group
from phalanx.shard.layout._metadata import ShardMetadata

_loading: ContextVar[Any] = ContextVar("phalanx_shard_loading", default=None)


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Unpickle sharded tensors onto ``process_group`` inside the block.

    >>> with load_with_process_group(group):            # doctest: +SKIP
    ...     state = torch.load(path, weights_only=False)

    Raises:
        RuntimeError: the block is inside another one.
    """
    if _loading.get() is not None:
        raise RuntimeError(
            'ProcessGroup already set by previous "load_with_process_group" context manager; leave that block first'
        )
    token = _loading.set(process_group)
    try:
        yield process_group
    finally:
        _loading.reset(token)


def _get_current_process_group() -> Any:
    """Return what ``load_with_process_group`` set, else the current group."""
    loading = _loading.get()
    return current_group() if loading is None else loading


class Outside:
    """Stands for the group of a sharded tensor on a rank that is not in it: it knows the layout and holds nothing."""

    rank = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"{name} of the group of a ShardedTensor, on a rank that is not in that group: this rank holds no shards "
            f"and takes no part. Call it on the ranks of the group only"
        )


def as_group(process_group: Any) -> Group:
    """Return a ``Group`` from what the user passed; None means the current one."""
    if process_group is None:
        return current_group()
    if process_group == NON_GROUP_MEMBER:
        outside: Any = Outside()
        return outside  # type: ignore[no-any-return]  # as far as a rank outside may ask, it is one
    if isinstance(process_group, Group):
        return process_group
    if not callable(getattr(process_group, "rank", None)):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}; expected a phalanx Group, a c10d ProcessGroup or None"
        )
    return Group.wrap(process_group)


def owner_of(shard: ShardMetadata, group: Group) -> int:
    """Return the rank inside ``group`` that holds this shard; for a rank outside, some number that is not its own."""
    if isinstance(group, Outside):
        return 0
    if shard.placement is None:
        raise ValueError(f"{shard} has no placement; give it one such as 'rank:{group.ranks[0]}/cpu'")
    if shard.placement.worker_name() is not None:
        raise RuntimeError(
            f"{shard} is placed on worker {shard.placement.worker_name()!r}, which needs an RPC framework; "
            f"place it by rank, e.g. 'rank:{group.ranks[0]}/{shard.placement.device()}'"
        )
    rank = shard.placement.rank()
    if rank is None:
        raise ValueError(f"{shard} names a device but no rank; write e.g. 'rank:{group.ranks[0]}/{shard.placement}'")
    if rank not in group.ranks:
        raise ValueError(f"Global rank {rank} of {shard} does not exist in input process group: {list(group.ranks)}")
    return group.ranks.index(rank)


def check_rank_in_group(group: Group, name: str, rank: Any) -> None:
    if not isinstance(rank, int) or not 0 <= rank < group.size:
        raise ValueError(f"rank {group.rank}: {name}={rank!r}; expected a rank of the group, in [0, {group.size})")
