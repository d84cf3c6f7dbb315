"""Says which parameters take part in a pass and where each one's gradient lies.

A plan is fixed between two agreements of the ranks; the reducer replaces it as a whole. It owns the buckets' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx.ddp.buckets._assignment import Caps, assign_buckets, complete_order
from phalanx.ddp.buckets._flat_buffer import FlatBufferPool
from phalanx.ddp.buckets._parameters import NamedParameter
from phalanx.ddp.reducer._pass import LARGE_BYTES

if TYPE_CHECKING:
    from phalanx.comm import Group


class BucketPlan:
    """Layout and memory for the given members. ``order`` is the expected order of arrival; without one, the reverse of
    registration, which all ranks share without asking."""

    def __init__(
        self,
        group: Group,
        members: Sequence[NamedParameter],
        caps: Caps,
        order: Sequence[int] | None,
        *,
        metadata_length: int,
        aliasing_allowed: bool,
    ) -> None:
        self.members = list(members)
        self.params = [member.part for member in members]
        self.infos = [member.info for member in members]
        self.caps = caps
        self.order = complete_order(order or [], len(members))
        self.layout = assign_buckets(self.infos, self.order, caps)
        self.num_buckets = len(self.layout)
        self.sparse = [index for index, info in enumerate(self.infos) if info.sparse]
        self.large = [not info.sparse and info.nbytes >= LARGE_BYTES for info in self.infos]
        self.all_small = [b for b, members in enumerate(self.layout) if not any(self.large[i] for i in members)]
        self.bucket_of, self.place_of = [-1] * len(members), [0] * len(members)
        for bucket, indices in enumerate(self.layout):
            for place, index in enumerate(indices):
                self.bucket_of[index], self.place_of[index] = bucket, place
        # How many arrivals complete each bucket. Sparse parameters are in none, but the last one speaks for them.
        self.member_counts = [len(indices) for indices in self.layout]
        if self.member_counts:
            self.member_counts[-1] += len(self.sparse)
        # The last bucket carries the metadata of a step if it can hold its numbers exactly.
        self.metadata_fits = bool(self.layout) and self.infos[self.layout[-1][0]].dtype is torch.float32
        tails = [0] * len(self.layout)
        if self.metadata_fits:
            tails[-1] = metadata_length
        self.pools = [
            FlatBufferPool(
                [self.params[index] for index in indices],
                tail,
                allocator(group),
                aliasing_allowed=aliasing_allowed,
            )
            for indices, tail in zip(self.layout, tails, strict=True)
        ]

    def forget_memory(self) -> None:
        for pool in self.pools:
            pool.forget()

    def index_by_identity(self) -> dict[int, int]:
        return {id(param): index for index, param in enumerate(self.params)}


def allocator(group: Group) -> Callable[[int, torch.dtype, torch.device], Tensor]:
    """Memory that the group's collectives can use in place, where that is possible."""

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if is_host(device):
            return group.shared_empty((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    return allocate
