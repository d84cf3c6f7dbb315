"""Section: the parameters of one dtype in a unit, and their memory on this rank.

Owns the section's layout, its storage, the gather and the reduction. Everything here follows from a ``UnitLayout``;
that parameters are sharded by rows only shows in where their shards lie in the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx.comm import Group
from phalanx.fsdp._policies import AllGather, MixedPrecisionPolicy
from phalanx.fsdp.layout._unit_layout import UnitLayout, cells, flat_starts, rows
from phalanx.fsdp.unit._gradient_sum import Destination, GradientSum, ReducePlan, reduce_plan
from phalanx.fsdp.unit._mapped_gather import MappedGather, MappedMemory
from phalanx.fsdp.unit._parameter import ManagedParameter
from phalanx.fsdp.unit._unit_driver import GradientReduction
from phalanx.fsdp.unit._unit_gather import CopyGather, Gather, part_length
from phalanx.fsdp.unit._unit_memory import BufferPool, GatheredMemory, ShardStorage, pool_of


@dataclass(frozen=True, kw_only=True)
class UnitPlace:
    """Where a unit lives: group, devices, precision, and the buffers it borrows."""

    group: Group
    device: torch.device
    """On which it is gathered and computed."""
    shard_device: torch.device
    """On which its shards are kept."""
    block: Group | None = None
    """The ranks that keep the unit after forward, a part each; None: it is freed (or kept whole)."""
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)

    @property
    def pool(self) -> BufferPool:
        return pool_of(self.group)


FlatMemory = MappedMemory | GatheredMemory


def flat_memory(place: UnitPlace, length: int, dtype: torch.dtype, *, maps: bool) -> FlatMemory:
    """Return where a flat vector is gathered: by mapping where the ranks share memory, else by copying."""
    if maps and place.group.backend == "shm" and is_host(place.device) and length:
        return MappedMemory(length, dtype)
    return GatheredMemory(length, dtype, place.device)


def gather_into(memory: FlatMemory, group: Group, layout: UnitLayout, pool: BufferPool) -> Gather:
    if isinstance(memory, MappedMemory):
        return MappedGather(group, layout, memory)
    return CopyGather(group, layout, memory, pool)


class Section:
    """Parameters of one dtype of a unit."""

    def __init__(self, number: int, parameters: Sequence[ManagedParameter], place: UnitPlace) -> None:
        self.number = number
        self.parameters = list(parameters)
        self.place = place
        self.dtype = parameters[0].local.dtype
        sizes = [p.numel for p in parameters]
        starts = flat_starts(sizes)
        self.extents = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.layout: UnitLayout = rows([p.shape for p in parameters], place.group.size, [p.dim for p in parameters])
        self.spans = [self.layout.local_span(place.group.rank, *extent) for extent in self.extents]
        self.storage: ShardStorage | None = None
        self.comm: AllGather | None = None
        self.gather: Gather | None = None
        self._memory: FlatMemory | None = None
        self._block: tuple[Gather, ShardStorage] | None = None
        self._reduction: tuple[tuple[int, ...], GradientReduction] | None = None
        self._plans: dict[tuple[int, ...], ReducePlan] = {}
        self._make_reduction: Callable[[tuple[int, ...]], GradientReduction] = self._sum_of_ranks

    def relocate(
        self,
        number: int,
        place: UnitPlace,
        layout: UnitLayout,
        storage: ShardStorage,
        make_reduction: Callable[[tuple[int, ...]], GradientReduction],
    ) -> None:
        """Live in another group, held as ``layout`` says, which ``storage`` has; what was under way is forgotten.

        From then on the storage is its owner's business: parameters have no shards of their own in it.
        """
        self.number, self.place, self.layout, self.storage = number, place, layout, storage
        self.spans = []
        if self.gather is not None:
            self.gather.release()
        self.gather = self._block = self._reduction = None
        self._make_reduction = make_reduction

    # ---- the shard

    @property
    def gather_dtype(self) -> torch.dtype:
        wanted = self.place.precision.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.place.precision.reduce_dtype or self.gather_dtype

    def is_in_storage(self) -> bool:
        """Return whether all shards lie where the collectives will look for them."""
        storage = self.storage
        if storage is None:
            return False
        if not self.spans:
            return True  # it was relocated
        for parameter, (start, stop) in zip(self.parameters, self.spans, strict=True):
            local = parameter.local
            if local.dtype != self.dtype or (stop > start and local.data_ptr() != storage.address(start)):
                return False
        return True

    def take_in(self) -> None:
        """Move all shards into one flat buffer; the parameters stay the same objects."""
        place = self.place
        storage = ShardStorage(place.group, part_length(self.layout), self.dtype, place.shard_device)
        with torch.no_grad():
            for parameter, (start, _) in zip(self.parameters, self.spans, strict=True):
                there = storage.alias(start, parameter.local_shape)
                there.copy_(parameter.local.detach())
                parameter.local.data = there
        self.storage = storage

    # ---- gathering

    def prepare_gather(self, arrived: Callable[[int], Callable[[Tensor], None]]) -> Gather:
        """Make the gathered parameters, once; ``arrived(i)`` is told of gradients of parameter i."""
        if self.comm is not None and isinstance(self.gather, MappedGather):
            self.gather = self._memory = None  # users want to see the bytes that are sent
        if self.gather is None:
            place = self.place
            memory, is_new = self._flat_memory()
            self.gather = gather_into(memory, place.group, self.layout, place.pool)
            if place.block is not None:
                layout = cells(self.layout.length, [[rank] for rank in range(place.block.size)])
                storage = ShardStorage(place.block, part_length(layout), self.gather_dtype, place.device)
                self._block = (gather_into(memory, place.block, layout, place.pool), storage)
            if is_new:
                self._make_wholes(memory, arrived)
        if isinstance(self.gather, CopyGather):
            self.gather.comm = self.comm
        return self.gather

    def _flat_memory(self) -> tuple[FlatMemory, bool]:
        """Return where to gather, and whether that is new: in another group the parameters can stay what they are."""
        maps = self.comm is None and self.place.group.backend == "shm"
        if self._memory is not None and isinstance(self._memory, MappedMemory) == maps:
            return self._memory, False
        self._memory = flat_memory(self.place, self.layout.length, self.gather_dtype, maps=self.comm is None)
        return self._memory, True

    def _make_wholes(self, memory: FlatMemory, arrived: Callable[[int], Callable[[Tensor], None]]) -> None:
        for index, (parameter, (start, _)) in enumerate(zip(self.parameters, self.extents, strict=True)):
            parameter.make_whole(memory.flat, start)
            if parameter.leaf.is_floating_point() or parameter.leaf.is_complex():
                parameter.leaf.requires_grad_(True).register_post_accumulate_grad_hook(arrived(index))
                parameter.leaf.requires_grad_(parameter.sharded.requires_grad)

    def is_kept(self, version: int) -> bool:
        """Return whether it can be gathered again without the other ranks."""
        return self.gather is not None and self.comm is None and self.gather.is_kept(version)

    def start_again(self) -> Gather:
        """Begin to gather what is kept."""
        assert self.gather is not None, "it was gathered before"
        self.gather.start_again()
        return self.gather

    def keep_part(self) -> None:
        """Copy this rank's part of the gathered vector, so that its block of ranks alone can gather it again."""
        if self._block is not None:
            gather, storage = self._block
            assert self.place.block is not None, "a block was asked for"
            begin = self.place.block.rank * storage.count
            kept = gather.flat[begin : begin + storage.count]
            storage.alias(0, (kept.numel(),)).copy_(kept)

    def source(self, *, of_block: bool) -> tuple[Gather, ShardStorage]:
        """Return how to gather, and from what: from all ranks' shards, or from what the block kept."""
        if of_block:
            assert self._block is not None, "it was kept before"
            return self._block
        assert self.gather is not None, "it was prepared"
        assert self.storage is not None, "it was brought home"
        return self.gather, self.storage

    def use_comm(self, comm: AllGather | None) -> None:
        """Gather with ``comm`` from the next time on; None: with the group's own collective."""
        self.comm = comm

    # ---- gradients

    def trainable(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.parameters) if p.sharded.requires_grad)

    def reduction(self) -> GradientReduction:
        """Return where gradients go; made anew when other parameters are trained than before."""
        wanted = self.trainable()
        if self._reduction is None or self._reduction[0] != wanted:
            assert self._reduction is None or self._reduction[1].is_empty, "a reduction was left unfinished"
            self._reduction = (wanted, self._make_reduction(wanted))
        return self._reduction[1]

    def _sum_of_ranks(self, wanted: tuple[int, ...]) -> GradientSum:
        plan = self._plans.get(wanted)
        if plan is None:
            extents = [self.extents[i] for i in wanted]
            plan = self._plans[wanted] = reduce_plan(self.layout, self.place.group.rank, extents)
        return GradientSum(self.number, plan, self.reduce_dtype, self.place.device, self.place.pool)

    def add_gradient(self, index: int, grad: Tensor) -> None:
        reduction = self.reduction()
        assert self._reduction is not None, "just made"
        reduction.add(self.place.group, self._reduction[0].index(index), grad)

    @property
    def has_gradients(self) -> bool:
        return self._reduction is not None and not self._reduction[1].is_empty

    def start_reduce(self, to: Destination, *, async_op: bool) -> None:
        self.reduction().start(to, async_op=async_op)

    def sum_replicas(self) -> bool:
        """Begin what replicas have to add up, if there is such a thing."""
        assert self._reduction is not None, "it was started"
        reduction = self._reduction[1]
        return isinstance(reduction, GradientSum) and reduction.sum_replicas()

    def finish_reduce(self) -> list[ManagedParameter]:
        """Give shards their gradients; the parameters that got one."""
        assert self._reduction is not None, "it was started"
        wanted, reduction = self._reduction
        pieces = reduction.finish()
        if pieces is None:
            return []
        got = []
        for index, piece in zip(wanted, pieces, strict=True):
            if piece is not None:
                parameter = self.parameters[index]
                _accumulate(parameter, piece, self.place.shard_device)
                got.append(parameter)
        return got

    def drop_gradients(self) -> None:
        if self._reduction is not None:
            self._reduction[1].drop()


def _accumulate(parameter: ManagedParameter, piece: Tensor, device: torch.device) -> None:
    local = parameter.local
    grad = piece.to(device=device, dtype=local.dtype).view(parameter.local_shape)
    if local.grad is None:
        local.grad = grad
    else:
        local.grad += grad
