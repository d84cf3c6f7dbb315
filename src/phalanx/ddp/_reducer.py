"""The reducer: turns gradients that autograd produces into gradients that all ranks share.

How a pass goes:
1. Autograd reaches an output of a synchronised forward: ``begin``. Gradients of before are set aside, slabs chosen,
   and the end of this backward is asked to call ``_end_of_backward``.
2. Gradients arrive. Small ones only leave a note (``list.append``); large ones, and the last expected one of each
   bucket, call ``_progress``, which copies and launches every bucket that is complete, in the fixed order.
3. The end of backward launches what never filled (unused parameters contribute zeros), waits, and hands out.

Guarantees: all ranks launch the same collectives in the same order whatever they used. A failure anywhere inside
restores ``.grad`` and raises in the thread that called backward.
Assumes: all ranks run equally many synchronised backward passes.
Rejected: walking the graph to find unused parameters (costs each step and cannot see other ranks); a thread that
reduces in the background (with as many ranks as cores it only takes time from backward).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.ddp import _ledger as ledger
from phalanx.ddp import _rebuild as rebuild
from phalanx.ddp._bucket import GradBucket
from phalanx.ddp._layout import Caps, assign_buckets, complete_order
from phalanx.ddp._memory import SlabPool
from phalanx.ddp._pass import LARGE_BYTES, BackwardPass
from phalanx.ddp._roster import Member
from phalanx.ddp._sparse import SparseReduction
from phalanx.ddp._stats import Stats
from phalanx.ddp._watch import ArrivalWatch

if TYPE_CHECKING:
    from phalanx.comm import Group

CommHook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]
BucketReady = Callable[[int, Tensor], None]
# Synchronised passes after which buckets are cut anew: first by the observed order, then by measured times too.
REBUILD_AFTER, TUNE_AFTER = 1, 3


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    caps: Caps
    reduce: str = "mean"
    gradient_as_bucket_view: bool = False
    launch_early: bool = True


@dataclass(frozen=True)
class Agreement:
    """How the next pass differs from this one; equal on all ranks except for the parameters' identity."""

    members: Sequence[Member]
    caps: Caps
    order: Sequence[int] | None
    late_grads: Sequence[tuple[nn.Parameter, Tensor]]


class Reducer:
    """See the module's text. ``on_bucket_ready(index, flat)``, if set, is told of every bucket before it is launched."""

    def __init__(self, group: Group, members: Sequence[Member], options: ReducerOptions, stats: Stats) -> None:
        self.group = group
        self.options = options
        self.stats = stats
        self.divisor = group.size
        self.comm_hook: tuple[CommHook, Any] | None = None
        self.on_bucket_ready: BucketReady | None = None
        self.after_pass: list[Callable[[], None]] = []
        self.step_weight: float | None = None
        self.wants_regroup = False
        self.totals: ledger.Totals | None = None
        self.sparse = SparseReduction()
        self._pass: BackwardPass | None = None
        self._handles: list[Any] = []
        self._lock = threading.RLock()
        self._watch = ArrivalWatch(self._progress)
        self._local: set[int] = set()
        self._dropped: frozenset[int] = frozenset()
        self._proposed: list[Member] | None = None
        self._armed = False
        self._passes = 0
        self._repeated: set[int] = set()
        self._awaited: list[Any] = []
        self._stopped = False
        self.install(members, caps=options.caps)

    # ---- layout -----------------------------------------------------------------------------------------------

    def install(
        self, members: Sequence[Member], *, caps: Caps, order: Sequence[int] | None = None
    ) -> None:
        """Lay the parameters out in buckets; without ``order``, by reverse registration, which all ranks share."""
        known = {id(param): index for index, param in enumerate(getattr(self, "params", ()))}
        was_local = [known.get(id(member.param)) in self._local for member in members]
        self.members = list(members)
        self.params = [member.param for member in members]
        self.caps = caps
        infos = [member.info for member in members]
        self.order = complete_order(order or [], len(infos))
        self.layout = assign_buckets(infos, self.order, caps)
        self.sparse_indices = [index for index, info in enumerate(infos) if info.sparse]
        self._bucket_of = [-1] * len(infos)
        self._place_of = [0] * len(infos)
        for bucket, indices in enumerate(self.layout):
            for place, index in enumerate(indices):
                self._bucket_of[index], self._place_of[index] = bucket, place
        self._large = [not info.sparse and info.nbytes >= LARGE_BYTES for info in infos]
        self._ledger_rides = bool(self.layout) and infos[self.layout[-1][0]].dtype is torch.float32
        self._make_pools()
        self._local = {index for index, local in enumerate(was_local) if local}
        self._dropped, self._proposed = frozenset(), None
        if order is None:
            self._passes, self._repeated = 0, set()
        self._watch.follow(self.params, self._must_watch())

    def _make_pools(self) -> None:
        last = len(self.layout) - 1
        tail = ledger.length(len(self.params)) if self._ledger_rides else 0
        self._pools = [
            SlabPool(
                [self.params[index] for index in indices],
                tail if bucket == last else 0,
                self._allocate,
                aliasing_allowed=self.options.gradient_as_bucket_view,
            )
            for bucket, indices in enumerate(self.layout)
        ]

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self.group.shared_empty((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def _must_watch(self) -> set[int]:
        """Parameters whose arrival must be noticed at once: all while times are measured, then few."""
        if self._passes < TUNE_AFTER or self._armed:
            return set(range(len(self.params)))
        return {index for index, large in enumerate(self._large) if large} | {b[-1] for b in self.layout}

    def regroup(self, group: Group) -> None:
        """Go on in another group. A pass under way is dropped; the layout starts from registration order again."""
        self.discard()
        self.group = group
        self.divisor = group.size
        self.wants_regroup = False
        self.install(self.members, caps=self.options.caps)

    def propose(self, members: Sequence[Member]) -> None:
        """The module's parameters changed here; the next pass asks all ranks to agree."""
        current = {id(member.param) for member in members}
        known = {id(param) for param in self.params}
        self._proposed = list(members)
        self._dropped = frozenset(i for i, param in enumerate(self.params) if id(param) not in current)
        self._watch.also([member.param for member in members if id(member.param) not in known])

    # ---- the pass ---------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Keep books between passes: our hooks run last, arrivals outside a pass are noted."""
        self._watch.run_last()
        if self._pass is None:
            self._note_local()

    def arm(self) -> None:
        """A synchronised forward returned nothing to hang a hook on: take the next arrival for the beginning."""
        self._armed = True
        self._watch.follow(self.params, self._must_watch())

    def on_output_grad(self, grad: Tensor) -> None:
        """Hook of every output: the backward pass has begun."""
        task = torch._C._current_graph_task_id()
        if (self._pass is None or self._pass.task != task) and not self._stopped:
            verdict = self._writes_gradients()
            if verdict is not False:
                self._begin(task, certain=verdict is True)

    def _writes_gradients(self) -> bool | None:
        """Whether this backward accumulates into ``.grad``: yes; no; or into some parameters perhaps (None).

        ``torch.autograd.grad`` does not, ``backward(inputs=...)`` does for what it is given.
        """
        trainable = next((param for param in self.params if param.requires_grad), None)
        if trainable is None:
            return None
        with torch.enable_grad():
            node = trainable.expand_as(trainable).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it has one
        try:
            return True if torch._C._will_engine_execute_node(node) else None  # type: ignore[attr-defined]  # not in the stubs
        except RuntimeError:
            return False  # autograd.grad with respect to this very parameter

    @torch.no_grad()
    def _begin(self, task: int, *, certain: bool = True) -> BackwardPass:
        if self._pass is not None:
            self.discard()  # its backward was abandoned: the user's code raised
        self._note_local()
        self.stats.current.backward_start = self.stats.now()
        mean = self.options.reduce == "mean"
        weight = self.step_weight if self.options.reduce == "weighted" else None
        current = BackwardPass(
            task, len(self.params), len(self.layout), self._prescale(), mean, weight, frozenset(self._local)
        )
        current.set_aside(self.params, self._dropped)
        busy = {grad.untyped_storage()._cdata for grad in current.stash.values() if not grad.is_sparse}
        current.slabs = [pool.writable(busy) for pool in self._pools]
        current.missing = self._member_counts()
        current.certain = certain
        self._pass, self._handles = current, []
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]  # not in the stubs
        engine.queue_callback(partial(self._end_of_backward, current))
        return current

    def _member_counts(self) -> list[int]:
        counts = [len(indices) for indices in self.layout]
        if counts:
            counts[-1] += len(self.sparse_indices)
        return counts

    def _prescale(self) -> float | None:
        if self.comm_hook is not None or self.options.reduce == "sum":
            return None
        if self.options.reduce == "weighted":
            if self.step_weight is None:
                raise ValueError(
                    f"rank {self.group.rank}: reduce='weighted' needs this step's weight before backward: "
                    "call set_step_weight(...), e.g. with the number of tokens of this rank's batch"
                )
            return self.step_weight
        return None if self.divisor == 1 else 1.0 / self.divisor

    def _note_local(self) -> None:
        """Arrivals outside a synchronised pass (``no_sync``) are gradients that the other ranks have not seen."""
        self._local.update(index for index in self._watch.drain() if index >= 0)

    @torch.no_grad()
    def _progress(self) -> None:
        """Take in what arrived and launch what is complete. Called from gradient hooks."""
        with self._lock:
            if self._pass is None:
                if not self._armed:
                    return
                arrived, self._watch.inbox[:] = list(self._watch.inbox), []
                self._begin(torch._C._current_graph_task_id()).unstash(self.params, self._watch.indices(arrived))
                self._watch.inbox.extend(arrived)
            current = self._pass
            assert current is not None
            try:
                self._take_in(current)
                if self._passes == 0 or not self.options.launch_early:
                    return  # the first pass learns the order, and which parameters arrive more than once
                while current.next_launch < len(self.layout) and not current.missing[current.next_launch]:
                    self._launch(current)
            except BaseException:
                self.discard()
                raise

    def _take_in(self, current: BackwardPass) -> None:
        for index in self._watch.drain():
            if index < 0:
                continue  # a parameter that is not agreed yet: see _settle_members
            bucket = self._bucket_of[index]
            if current.arrived[index]:
                self._arrived_again(current, index)
                continue
            current.arrived[index] = 1
            current.order.append(index)
            if self._passes < TUNE_AFTER:
                self.stats.current.ready.append(self.stats.now())
            if index in self._repeated or self._passes == 0:
                continue
            if bucket < 0:  # sparse: in no bucket, but the last one tells whether it was used
                if current.missing:
                    current.missing[-1] -= 1
                continue
            current.missing[bucket] -= 1
            current.last_arrival[bucket] = index
            if self._large[index]:
                current.fill_now(self.params, index, bucket, self._place_of[index], self.options.gradient_as_bucket_view)
            else:
                current.pending[bucket].append(index)

    def _arrived_again(self, current: BackwardPass, index: int) -> None:
        """Reentrant checkpointing accumulates shared weights several times: such ones wait for the end."""
        if index in self._repeated or self._passes == 0 or self._bucket_of[index] < 0:
            self._repeated.add(index)
            return
        raise RuntimeError(
            f"rank {self.group.rank}: parameter {self.members[index].name!r} got a second gradient in one backward "
            "pass, which it did not in the first: with reentrant checkpointing a parameter must be shared by "
            "checkpointed parts in every step or in none; use checkpoint(..., use_reentrant=False)"
        )

    @property
    def is_busy(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._pass is not None

    def stop(self) -> None:
        """Take all hooks off the parameters and never begin a pass again."""
        self.discard()
        self._watch.stop()
        self._stopped = True

    def await_after_backward(self, futures: Sequence[Any]) -> None:
        """Wait for these too at the end of the next synchronised backward."""
        self._awaited.extend(futures)

    @torch.no_grad()
    def mirror_pass(self) -> None:
        """Take part in the other ranks' pass with nothing to add; own gradients stay as they are."""
        current = BackwardPass(-1, len(self.params), len(self.layout), None, True, None, frozenset())
        current.slabs = [pool.writable(()) for pool in self._pools]
        current.missing = self._member_counts()
        current.mirrors = True
        self._handles = []
        for slab in current.slabs:
            slab.grads.zero_()
        while current.next_launch < len(self.layout):
            self._launch(current)
        totals = self._finish(current)
        for index in self.sparse_indices:
            self.sparse.reduce(self.group, self.members[index].name, self.params[index], None)
        agreed = self._agree(current, totals)
        self._handles = []
        self._close_books(current, totals, agreed)

    def discard(self) -> None:
        """Drop the pass under way, if any: ``.grad`` is as before it, and its memory is never written again."""
        current, self._pass = self._pass, None
        self._armed = False
        self._watch.inbox.clear()
        if current is not None:
            current.restore(self.params, self._dropped)
            self._handles = []
            for pool in self._pools:
                pool.forget()

    # ---- launching and finishing ------------------------------------------------------------------------------

    def _launch(self, current: BackwardPass) -> None:
        """Send the next bucket."""
        bucket = current.next_launch
        slab, last = current.slabs[bucket], bucket == len(self.layout) - 1
        current.fill_pending(self.params, bucket, self._place_of)
        if not bucket:
            self.stats.current.first_launch = self.stats.now()
        if self.on_bucket_ready is not None:
            self.on_bucket_ready(bucket, slab.grads)
        if self.comm_hook is not None:
            hook, state = self.comm_hook
            view = GradBucket(bucket, slab.grads, [self.params[i] for i in self.layout[bucket]], is_last=last)
            self._handles.append(hook(state, view))
        elif last and self._ledger_rides:
            self._entry(current).write(slab.tail)
            self._handles.append(self.group.all_reduce(slab.flat, async_op=True))
        else:
            self._handles.append(self.group.all_reduce(_as_real(slab.grads), async_op=True))
        current.next_launch += 1

    def _entry(self, current: BackwardPass) -> ledger.Entry:
        if current.mirrors:
            return ledger.Entry([False] * len(self.params), 0.0, contributes=False)
        grads_before = current.stash
        used = [
            bool(current.arrived[index]) or (index in self._local and index in grads_before)
            for index in range(len(self.params))
        ]
        weight = 1.0 if self.step_weight is None else self.step_weight
        return ledger.Entry(used, weight, self.wants_regroup, self._proposed is not None)

    @torch.no_grad()
    def _end_of_backward(self, current: BackwardPass) -> None:
        if self._pass is not current:
            return  # discarded by a failure that is on its way to the caller
        with self._lock:
            try:
                self._take_in(current)
                if not (current.certain or current.order):
                    self._pass = None
                    current.restore(self.params, self._dropped)
                    return
                self.stats.current.backward_end = self.stats.now()
                while current.next_launch < len(self.layout):
                    current.pend_rest(self.layout[current.next_launch], current.next_launch)
                    self._launch(current)
                totals = self._finish(current)
                sparse = self._reduce_sparse(current, totals)
                agreed = self._agree(current, totals)
            except BaseException:
                self.discard()
                raise
            # From here on nothing can fail for lack of a peer.
            self._deliver(current, totals, sparse)
            self._pass, self._handles = None, []
            self._close_books(current, totals, agreed)

    def _finish(self, current: BackwardPass) -> ledger.Totals:
        """Wait for everything that was launched."""
        for bucket, handle in enumerate(self._handles):
            result = handle.wait()
            if self.comm_hook is not None:
                self._take_result(current, bucket, result)
        carrier = current.slabs[-1].tail if self._ledger_rides and self.comm_hook is None else None
        if carrier is None:
            # After the buckets: a hook's callbacks may start collectives from other threads until its future is done.
            carrier = torch.zeros(ledger.length(len(self.params)), device=self.params[0].device)
            self._entry(current).write(carrier)
            self.group.all_reduce(carrier)
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.wait()
        totals = ledger.Totals.read(carrier)
        if self.options.reduce == "weighted":
            if totals.weight == 0:
                raise ValueError(f"rank {self.group.rank}: the weights of all ranks sum to 0 in this step")
            for slab in current.slabs:
                slab.grads.div_(totals.weight)
        return totals

    def _take_result(self, current: BackwardPass, bucket: int, result: object) -> None:
        """Put what a communication hook returned where the gradients are."""
        buffer = current.slabs[bucket].grads
        value = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
        if not isinstance(value, Tensor) or value.numel() != buffer.numel():
            raise RuntimeError(
                f"rank {self.group.rank}: the communication hook's future for bucket {bucket} must hold one tensor "
                f"of {buffer.numel()} elements, got {value.shape if isinstance(value, Tensor) else type(value)}"
            )
        if value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value.reshape(-1))

    def _reduce_sparse(self, current: BackwardPass, totals: ledger.Totals) -> list[Tensor]:
        factor = self._factor(totals)
        sums = []
        for index in self.sparse_indices:
            param = self.params[index]
            grad = current.sparse_contribution(param, index)
            sums.append(self.sparse.reduce(self.group, self.members[index].name, param, grad) * factor)
        return sums

    def _factor(self, totals: ledger.Totals) -> float:
        """What turns a sum over ranks of (weighted) gradients into the result."""
        if self.options.reduce == "weighted":
            return 1.0 / totals.weight
        return 1.0 / self.divisor if self.options.reduce == "mean" else 1.0

    def _deliver(self, current: BackwardPass, totals: ledger.Totals, sparse: Sequence[Tensor]) -> None:
        self.totals = totals
        used = totals.used_anywhere
        for bucket, indices in enumerate(self.layout):
            members = [i for i in indices if i not in self._dropped] if self._dropped else indices
            places = [self._place_of[i] for i in members]
            as_views = self.options.gradient_as_bucket_view
            current.deliver(self.params, members, places, current.slabs[bucket], used, as_views=as_views)
        for index, total in zip(self.sparse_indices, sparse, strict=True):
            before = current.stash.get(index)
            self.params[index].grad = current.sparse_result(index, total) if used[index] else before

    def _agree(self, current: BackwardPass, totals: ledger.Totals) -> Agreement | None:
        """What all ranks do before the next pass. Decided by shared values only, so all ranks are in it or none."""
        passes = self._passes + 1
        if totals.roster_changed:
            members = self._proposed if self._proposed is not None else self.members
            known = {id(param) for param in self.params}
            late = [member for member in members if id(member.param) not in known]
            rebuild.agree_on_members(self.group, members)
            grads = rebuild.reduce_late(self.group, late, self._factor(totals), current.weight)
            return Agreement(members, self.options.caps, None, grads)
        tune = passes == TUNE_AFTER and not self.caps.chosen_by_user and self.comm_hook is None
        if passes == REBUILD_AFTER or tune:
            order = rebuild.agree_on_order(self.group, current.order, sorted(self._repeated), len(self.params))
            caps = self.caps
            if tune and len(self.params) > 1:
                infos = [member.info for member in self.members]
                caps = rebuild.agree_on_caps(self.group, infos, order, self.stats.current.ready)
            return Agreement(self.members, caps, order, [])
        return None

    def _close_books(self, current: BackwardPass, totals: ledger.Totals, agreed: Agreement | None) -> None:
        self.stats.current.comm_end = self.stats.now()
        self.stats.end_step([m.name for m, used in zip(self.members, totals.used_anywhere, strict=True) if not used])
        self._local.clear()
        self._armed = False
        self.step_weight = None
        self._passes += 1
        if agreed is not None:
            for param, grad in agreed.late_grads:
                param.grad = grad
            self.install(agreed.members, caps=agreed.caps, order=agreed.order)
            self.stats.rebuilds += 1
        elif self._passes == TUNE_AFTER:
            self._watch.follow(self.params, self._must_watch())
        else:
            for index in current.last_arrival:
                if index >= 0:
                    self._watch.promote(self.params[index])
        for callback in self.after_pass:
            callback()


def _as_real(tensor: Tensor) -> Tensor:
    """Complex gradients travel as pairs of real numbers, which every backend can add."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
