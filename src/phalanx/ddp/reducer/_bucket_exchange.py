"""Sends the buckets of a pass and takes the sums back: what goes over the wire, and nothing about arrivals.

Owns the group, the communication hook, what is under way, and how a sum over ranks becomes the result. Collectives
start in the order of ``launch`` calls; ``finish`` waits for all of them. A failure leaves nothing to undo here but
``drop``: restoring gradients is the reducer's.

Owns also the metadata of a step, which travels with its gradients: one float32 number per parameter ("used here") and a
short header, summed over ranks by the same all-reduce that carries the last bucket. So knowing that a parameter was
used anywhere, the total weight, or that someone wants to regroup, costs no collective of its own. If the last bucket is
not float32, or a communication hook owns the bucket's contents, it travels as a tiny all-reduce of its own instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx import comm
from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import LazyFuture
from phalanx.ddp.hooks.default import SENT_AS
from phalanx.ddp.reducer._bucket_plan import BucketPlan
from phalanx.ddp.reducer._pass import BackwardPass
from phalanx.ddp.reducer._sparse import SparseReduction

if TYPE_CHECKING:
    from phalanx.comm import Group

CommHook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


HEADER = 4  # weight, wants_regroup, parameters_changed, contributors


@dataclass(frozen=True)
class StepMetadata:
    """What one rank tells the others with its gradients; ``used`` has a byte per parameter, 1 if it has a gradient."""

    used: bytearray
    weight: float = 1.0
    wants_regroup: bool = False
    parameters_changed: bool = False
    contributes: bool = True

    def write(self, tensor: Tensor) -> None:
        header = [self.weight, self.wants_regroup, self.parameters_changed, self.contributes]
        tensor[:HEADER].copy_(tensor.new_tensor([float(value) for value in header]))
        tensor[HEADER:].copy_(torch.frombuffer(self.used, dtype=torch.uint8))


@dataclass(frozen=True)
class StepTotals:
    """What the ranks told each other, summed up; equal on all of them."""

    used_anywhere: list[bool]
    weight: float
    regroup_wanted: bool
    parameters_changed: bool
    contributors: int

    @classmethod
    def read(cls, tensor: Tensor) -> StepTotals:
        weight, regroup, changed, contributors = tensor[:HEADER].tolist()
        used = (tensor[HEADER:] > 0).tolist()
        return cls(used, weight, regroup > 0, changed > 0, round(contributors))


def metadata_length(num_params: int) -> int:
    """Return how many float32 numbers the metadata of a step takes."""
    return HEADER + num_params


class BucketExchange:
    """Sends buckets and takes their sums back.

    ``reduce`` is ``mean``, ``sum`` or ``weighted``; ``log``, if set, hears of every collective inside ``logged``.
    """

    def __init__(self, group: Group, reduce: str) -> None:
        self.reduce = reduce
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.log: Callable[[comm.CommEvent], None] | None = None
        self.sparse = SparseReduction()
        self._handles: list[Any] = []
        self._awaited: list[Any] = []
        self.use_group(group)

    def use_group(self, group: Group) -> None:
        self.group = group
        self.divisor: int = group.size

    def logged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.log is None else comm.observe(self.log)

    def drop(self) -> None:
        """Forget what is under way."""
        self._handles = []

    def await_after_backward(self, futures: Sequence[Any]) -> None:
        """Wait for these too at the end of the next synchronised backward."""
        self._awaited.extend(futures)

    def prescale(self, weight: float | None) -> float | None:
        """Factor for gradients on their way into a bucket; None leaves them as they are."""
        if self.comm_hook is not None or self.reduce == "sum":
            return None
        if self.reduce == "weighted":
            if weight is None:
                raise ValueError(
                    f"rank {self.group.rank}: reduce='weighted' needs this step's weight before backward: "
                    "call set_step_weight(...), e.g. with the number of tokens of this rank's batch"
                )
            return weight
        return None if self.divisor == 1 else 1.0 / self.divisor

    def copies_to_fill(self, plan: BucketPlan) -> dict[int, list[Tensor]]:
        """Return the views that take gradients in place of a bucket's own: those of its copy in the dtype that the hook
        sends, which is then all that is written and read of it. Buckets of small gradients only are copied at once."""
        sent_as = self._sent_as
        if sent_as is None:
            return {}
        return {
            bucket: plan.pools[bucket].views_of_copy(sent_as)
            for bucket, members in enumerate(plan.layout)
            if plan.infos[members[0]].dtype is not sent_as and bucket not in plan.all_small
        }

    @property
    def _sent_as(self) -> torch.dtype | None:
        return SENT_AS.get(self.comm_hook[0]) if self.comm_hook is not None else None

    def factor(self, totals: StepTotals) -> float:
        """Return what turns a sum over ranks of (weighted) gradients into the result."""
        if self.reduce == "weighted":
            return 1.0 / totals.weight
        return 1.0 / self.divisor if self.reduce == "mean" else 1.0

    def launch(self, plan: BucketPlan, current: BackwardPass, metadata: StepMetadata | None) -> None:
        """Send the next bucket; the last one takes the step's metadata along, if there is any to take."""
        bucket = current.next_launch
        buffer = current.buffers[bucket]
        if self.comm_hook is not None:
            hook, state = self.comm_hook
            members = plan.layout[bucket]
            params = [plan.members[index].param for index in members]
            last, space = bucket == plan.num_buckets - 1, plan.pools[bucket].space_for_copy
            filled_as = self._sent_as if bucket in current.copies else None
            seen = GradBucket(
                bucket,
                buffer.grads,
                params,
                is_last=last,
                members=members,
                space_for_copy=space,
                filled_as=filled_as,
            )
            with comm.use_group(self.group):  # what a hook without a group in its state reduces over
                self._handles.append(hook(state, seen))
        elif metadata is not None:
            metadata.write(buffer.tail)
            self._handles.append(self.group.all_reduce(buffer.flat, async_op=True))
        else:
            self._handles.append(self.group.all_reduce(buffer.grads, async_op=True))
        current.next_launch += 1

    def finish(self, plan: BucketPlan, current: BackwardPass, metadata: StepMetadata | None) -> StepTotals:
        """Wait for everything that was launched. ``metadata`` is what no bucket carries."""
        carrier: Tensor | None = current.buffers[-1].tail if metadata is None else None
        sent = None
        if metadata is not None and all(isinstance(handle, LazyFuture) for handle in self._handles):
            # The callbacks of such futures run below, on this thread: the metadata comes before what they may send.
            carrier = _carrier(plan, metadata)
            sent = self.group.all_reduce(carrier, async_op=True)
        for bucket, handle in enumerate(self._handles):
            result = handle.wait()
            if self.comm_hook is not None:
                current.take_result(bucket, result, self.group.rank)
        if carrier is None:
            # After the buckets: a hook's callbacks may start collectives from other threads until its future is done.
            assert metadata is not None, "it rides in the last bucket, or is given"
            carrier = _carrier(plan, metadata)
            self.group.all_reduce(carrier)
        elif sent is not None:
            sent.wait()
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.wait()
        totals = StepTotals.read(carrier)
        if self.reduce == "weighted":
            if totals.weight == 0:
                raise ValueError(f"rank {self.group.rank}: the weights of all ranks sum to 0 in this step")
            for buffer in current.buffers:
                buffer.grads.div_(totals.weight)
        return totals

    def reduce_sparse(self, plan: BucketPlan, current: BackwardPass, totals: StepTotals) -> list[Tensor]:
        """Sparse gradients, one parameter after the other, after all buckets."""
        factor = self.factor(totals)
        sums = []
        for index in plan.sparse:
            param = plan.params[index]
            grad = None if current.mirrors else current.sparse_contribution(param, index)
            sums.append(self.sparse.reduce(self.group, plan.members[index].name, param, grad) * factor)
        return sums


def _carrier(plan: BucketPlan, metadata: StepMetadata) -> Tensor:
    """Return a tensor of its own for the step's metadata."""
    carrier = torch.zeros(metadata_length(len(plan.params)), device=plan.params[0].device)
    metadata.write(carrier)
    return carrier
