"""Sending the buckets of a pass and taking the sums back: what goes over the wire, and nothing about arrivals.

Owns the group, the communication hook, what is under way, and how a sum over ranks becomes the result. Collectives
start in the order of ``launch`` calls; ``finish`` waits for all of them. A failure leaves nothing to undo here but
``drop``: restoring gradients is the reducer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx import comm
from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.hooks._future import LazyFuture
from phalanx.ddp.reducer import _step_metadata as ledger
from phalanx.ddp.reducer._pass import BackwardPass
from phalanx.ddp.reducer._plan import Plan
from phalanx.ddp.reducer._sparse import SparseReduction

if TYPE_CHECKING:
    from phalanx.comm import Group

CommHook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]
BucketReady = Callable[[int, Tensor], None]
MakeEntry = Callable[[], ledger.Entry]


class Exchange:
    """``reduce`` is ``mean``, ``sum`` or ``weighted``. ``on_bucket_ready(index, flat)``, if set, hears of every bucket
    before it is launched; ``log``, if set, of every collective inside ``logged``."""

    def __init__(self, group: Group, reduce: str) -> None:
        self.reduce = reduce
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.on_bucket_ready: BucketReady | None = None
        self.log: Callable[[comm.CommEvent], None] | None = None
        self.sparse = SparseReduction()
        self._handles: list[Any] = []
        self._awaited: list[Any] = []
        self.use_group(group)

    def use_group(self, group: Group) -> None:
        self.group = group
        self.divisor = group.size

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

    def factor(self, totals: ledger.Totals) -> float:
        """What turns a sum over ranks of (weighted) gradients into the result."""
        if self.reduce == "weighted":
            return 1.0 / totals.weight
        return 1.0 / self.divisor if self.reduce == "mean" else 1.0

    def launch(self, plan: Plan, current: BackwardPass, make_entry: MakeEntry) -> None:
        """Send the next bucket; the last one takes the ledger along if it can."""
        bucket = current.next_launch
        slab, last = current.slabs[bucket], bucket == plan.num_buckets - 1
        current.fill_pending(plan.params, bucket, plan.place_of)
        if self.on_bucket_ready is not None:
            self.on_bucket_ready(bucket, slab.grads)
        if self.comm_hook is not None:
            hook, state = self.comm_hook
            members = plan.layout[bucket]
            params = [plan.params[index] for index in members]
            space = plan.pools[bucket].space_for_copy
            seen = GradBucket(bucket, slab.grads, params, is_last=last, members=members, space_for_copy=space)
            self._handles.append(hook(state, seen))
        elif last and plan.ledger_rides:
            make_entry().write(slab.tail)
            self._handles.append(self.group.all_reduce(slab.flat, async_op=True))
        else:
            self._handles.append(self.group.all_reduce(slab.grads, async_op=True))
        current.next_launch += 1

    def finish(self, plan: Plan, current: BackwardPass, make_entry: MakeEntry) -> ledger.Totals:
        """Wait for everything that was launched."""
        rides = plan.ledger_rides and self.comm_hook is None
        carrier: Tensor | None = current.slabs[-1].tail if rides else None
        sent = None
        if carrier is None and all(isinstance(handle, LazyFuture) for handle in self._handles):
            # The callbacks of such futures run below, on this thread: the ledger comes before what they may send.
            carrier = self._ledger_of_its_own(plan, make_entry)
            sent = self.group.all_reduce(carrier, async_op=True)
        for bucket, handle in enumerate(self._handles):
            result = handle.wait()
            if self.comm_hook is not None:
                current.take_result(bucket, result, self.group.rank)
        if carrier is None:
            # After the buckets: a hook's callbacks may start collectives from other threads until its future is done.
            carrier = self._ledger_of_its_own(plan, make_entry)
            self.group.all_reduce(carrier)
        elif sent is not None:
            sent.wait()
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.wait()
        totals = ledger.Totals.read(carrier)
        if self.reduce == "weighted":
            if totals.weight == 0:
                raise ValueError(f"rank {self.group.rank}: the weights of all ranks sum to 0 in this step")
            for slab in current.slabs:
                slab.grads.div_(totals.weight)
        return totals

    @staticmethod
    def _ledger_of_its_own(plan: Plan, make_entry: MakeEntry) -> Tensor:
        carrier = torch.zeros(ledger.length(len(plan.params)), device=plan.params[0].device)
        make_entry().write(carrier)
        return carrier

    def reduce_sparse(self, plan: Plan, current: BackwardPass, totals: ledger.Totals) -> list[Tensor]:
        """Sparse gradients, one parameter after the other, after all buckets."""
        factor = self.factor(totals)
        sums = []
        for index in plan.sparse:
            param = plan.params[index]
            grad = None if current.mirrors else current.sparse_contribution(param, index)
            sums.append(self.sparse.reduce(self.group, plan.members[index].name, param, grad) * factor)
        return sums
