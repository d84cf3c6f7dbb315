"""Turns gradients that autograd produces into gradients that all ranks share.

How a pass goes:
1. Autograd reaches an output of a synchronised forward: ``_begin``. Gradients of before are set aside, buffers chosen,
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

from phalanx._torch_private import current_graph_task_id, execution_engine, will_engine_execute_node
from phalanx.ddp.buckets._assignment import Caps
from phalanx.ddp.buckets._local_tensors import local_part
from phalanx.ddp.buckets._parameters import NamedParameter
from phalanx.ddp.reducer import _rebuild as rebuild
from phalanx.ddp.reducer._arrivals import ArrivalWatch
from phalanx.ddp.reducer._bucket_exchange import (
    BucketExchange,
    CommHook,
    StepMetadata,
    StepTotals,
    metadata_length,
)
from phalanx.ddp.reducer._bucket_plan import BucketPlan
from phalanx.ddp.reducer._pass import BackwardPass
from phalanx.ddp.reducer._rebuild import REBUILD_AFTER, TUNE_AFTER, Agreement
from phalanx.ddp.reducer._stats import Stats

if TYPE_CHECKING:
    from phalanx.comm import Group


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    caps: Caps
    reduce: str = "mean"
    gradient_as_bucket_view: bool = False
    launch_early: bool = True


class Reducer:
    """See the module's text."""

    def __init__(self, group: Group, members: Sequence[NamedParameter], options: ReducerOptions, stats: Stats) -> None:
        self.options = options
        self.stats = stats
        self.exchange = BucketExchange(group, options.reduce)
        self.after_pass: list[Callable[[], None]] = []
        self.step_weight: float | None = None
        self.wants_regroup = False
        # Whether a parameter that autograd reached without a gradient on all ranks keeps the gradient it had; otherwise
        # it gets zeros. PyTorch's class decides it by find_unused_parameters and static_graph, and so does the wrapper.
        self.undefined_is_unused = False
        self.totals: StepTotals | None = None
        self._pass: BackwardPass | None = None
        self._lock = threading.RLock()
        self._watch = ArrivalWatch(self._on_gradient)
        self._watched: set[int] = set()
        self._local: set[int] = set()
        self._armed = False
        self._stopped = False
        self.plan: BucketPlan
        self._install(members, options.caps, None)

    # ---- the plan ---------------------------------------------------------------------------------------------

    def _install(self, members: Sequence[NamedParameter], caps: Caps, order: Sequence[int] | None) -> None:
        """Follow another plan. Without an order it is a new beginning: the first pass learns it."""
        local = {id(self.params[index]) for index in self._local}
        view = self.options.gradient_as_bucket_view
        length = metadata_length(len(members))
        self.plan = BucketPlan(self.group, members, caps, order, metadata_length=length, aliasing_allowed=view)
        self._local = {index for index, param in enumerate(self.plan.params) if id(param) in local}
        self._proposed: list[NamedParameter] | None = None
        self._dropped: frozenset[int] = frozenset()
        if order is None:
            self._passes = 0
            self._repeated: set[int] = set()
        self._follow()

    def _follow(self) -> None:
        """Hook the parameters. While times are measured every arrival must be noticed at once, later only a few."""
        if self._passes < TUNE_AFTER or self._armed:
            self._watched = set(range(len(self.params)))
        else:
            self._watched = {i for i, large in enumerate(self.plan.large) if large} | {b[-1] for b in self.layout}
        self._watch.follow(self.params, self._watched)

    @property
    def group(self) -> Group:
        return self.exchange.group

    @property
    def members(self) -> list[NamedParameter]:
        return self.plan.members

    @property
    def params(self) -> list[nn.Parameter]:
        return self.plan.params

    @property
    def layout(self) -> list[list[int]]:
        """Indices into ``params`` per bucket, in the order of launching."""
        return self.plan.layout

    @property
    def is_busy(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._pass is not None

    def regroup(self, group: Group) -> None:
        """Go on in another group. A pass under way is dropped; the plan starts from registration order again."""
        self.discard()
        self.exchange.use_group(group)
        self.wants_regroup = False
        self._install(self.members, self.options.caps, None)

    def use_hook(self, hook: CommHook, state: Any) -> None:
        """Let ``hook`` reduce. A state that comes from an earlier run may know the order that the buckets had there
        (``bucket_order``): the first pass then cuts them so."""
        self.exchange.comm_hook = (hook, state)
        order = list(getattr(state, "bucket_order", ()))
        dense = sorted({*range(len(self.params))} - {*self.plan.sparse})
        if self._passes == 0 and order and sorted(order) == dense:
            self._install(self.members, self.options.caps, order)

    def propose(self, members: Sequence[NamedParameter]) -> None:
        """Take note that the module's parameters changed here; the next pass asks all ranks to agree."""
        current = {id(member.part) for member in members}
        known = self.plan.index_by_identity()
        self._proposed = list(members)
        self._dropped = frozenset(index for key, index in known.items() if key not in current)
        self._watch.also([member.part for member in members if id(member.part) not in known])

    def stop(self) -> None:
        """Take all hooks off the parameters and never begin a pass again."""
        self.discard()
        self._watch.stop()
        self._stopped = True

    # ---- beginning --------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Between passes: let our hooks run last, and note arrivals outside a pass."""
        self._watch.run_last()
        if self._pass is None:
            self._note_local()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Let the backward pass through these be a synchronised one: it begins when it reaches one of them.

        Without one that has a graph, the first gradient must do. PyTorch's pipeline stages call this by its name.
        """
        with_graph = [output for output in outputs if output.grad_fn is not None]
        for output in with_graph:
            register: Any = local_part(output).register_hook  # untyped in torch
            register(self.on_output_grad)
        if not with_graph:
            self.arm()

    def arm(self) -> None:
        """A synchronised forward returned nothing to hang a hook on: take the next arrival for the beginning."""
        self._armed = not self._stopped
        self._follow()

    def on_output_grad(self, grad: Tensor) -> None:
        """Hook of every output: the backward pass has begun."""
        task = current_graph_task_id()
        if (self._pass is None or self._pass.task != task) and not self._stopped:
            writes = _writes_gradients(self.params)
            if writes is not False:
                self._begin(task, certain=writes is True)

    @torch.no_grad()
    def _begin(self, task: int, *, certain: bool = True) -> BackwardPass:
        if self._pass is not None:
            self.discard()  # its backward was abandoned: the user's code raised
        self._note_local()
        self.stats.current.backward_start = self.stats.now()
        plan = self.plan
        current = BackwardPass(
            task,
            len(plan.params),
            plan.num_buckets,
            self.exchange.prescale(self.step_weight),
            self.options.reduce == "mean",
            self.step_weight if self.options.reduce == "weighted" else None,
            frozenset(self._local),
            certain=certain,
        )
        current.set_aside(plan.params, self._dropped)
        busy = current.storages_in_use()
        for pool in plan.pools:
            current.buffers.append(pool.writable(busy))
        current.copies = self.exchange.copies_to_fill(plan)
        current.missing = list(plan.member_counts)
        if self.options.gradient_as_bucket_view and not (current.stash or self._dropped or self.undefined_is_unused):
            for bucket in plan.all_small if self._passes >= TUNE_AFTER else ():
                current.lend(plan.params, plan.layout[bucket], bucket)
        self._pass = current
        execution_engine.queue_callback(partial(self._end_of_backward, current))
        return current

    def _note_local(self) -> None:
        """Arrivals outside a synchronised pass (``no_sync``) are gradients that the other ranks have not seen."""
        if self._watch.inbox:
            self._local.update(index for index in self._watch.drain() if index >= 0)

    # ---- arrivals ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        """Hook of the watched parameters: take in what arrived and launch what is complete."""
        self._watch.inbox.append(param)
        with self._lock:
            current = self._pass or self._begin_by_arrival()
            if current is None:
                return
            try:
                self._take_in(current)
                if self._passes == 0 or not self.options.launch_early:
                    return  # the first pass learns the order, and which parameters arrive more than once
                while current.next_launch < len(self.layout) and not current.missing[current.next_launch]:
                    self._launch(current)
            except BaseException:
                self.discard()
                raise

    def _begin_by_arrival(self) -> BackwardPass | None:
        if not self._armed:
            return None
        arrived, self._watch.inbox[:] = list(self._watch.inbox), []
        current = self._begin(current_graph_task_id())
        current.unstash(self.params, self._watch.indices(arrived))
        self._watch.inbox.extend(arrived)
        return current

    def _take_in(self, current: BackwardPass) -> None:
        # Runs once per parameter and step: names are local, what is rare comes last.
        if not self._watch.inbox:
            return
        plan, arrived, missing, pending = self.plan, current.arrived, current.missing, current.pending
        bucket_of, large, repeated, note = plan.bucket_of, plan.large, self._repeated, current.order.append
        learning, timing = self._passes == 0, self._passes < TUNE_AFTER
        as_view = self.options.gradient_as_bucket_view
        arrivals = self._watch.drain()
        if not timing and current.take_small(arrivals, plan.bucket_of, large, repeated):
            return
        for index in arrivals:
            if index < 0:
                continue  # a parameter that is not agreed yet: see rebuild.reduce_late
            if arrived[index]:
                self._arrived_again(index)
                continue
            arrived[index] = 1
            note(index)
            if timing:
                self.stats.current.ready.append(self.stats.now())
            bucket = bucket_of[index]
            if learning or index in repeated:
                if large[index]:
                    current.keep_in_buffer(self.params[index], index, bucket, plan.place_of[index], as_view)
                continue
            if bucket < 0:  # sparse
                if missing:
                    missing[-1] -= 1
                continue
            missing[bucket] -= 1
            current.last_arrival[bucket] = index
            if large[index]:
                current.fill_now(self.params[index], index, bucket, plan.place_of[index], as_view)
            else:
                pending[bucket].append(index)

    def _arrived_again(self, index: int) -> None:
        """Reentrant checkpointing accumulates shared weights several times: such ones wait for the end."""
        if self._passes and index not in self._repeated and self.plan.bucket_of[index] >= 0:
            raise RuntimeError(
                f"rank {self.group.rank}: parameter {self.members[index].name!r} got a second gradient in one backward "
                "pass, which it did not in the first: with reentrant checkpointing a parameter must be shared by "
                "checkpointed parts in every step or in none; use checkpoint(..., use_reentrant=False)"
            )
        self._repeated.add(index)

    def discard(self) -> None:
        """Drop the pass under way, if any: ``.grad`` is as before it, and its memory is never written again."""
        current, self._pass = self._pass, None
        self._armed = False
        self._watch.inbox.clear()
        if current is not None:
            current.restore(self.params, self._dropped)
            current.forget()
            self.plan.forget_memory()
        self.exchange.drop()

    # ---- launching and finishing ------------------------------------------------------------------------------

    def _launch(self, current: BackwardPass) -> None:
        """Send the next bucket."""
        if not current.next_launch:
            self.stats.current.first_launch = self.stats.now()
        current.fill_pending(self.params, current.next_launch, self.plan.place_of)
        last = current.next_launch == self.plan.num_buckets - 1
        metadata = self._metadata(current) if last and self._metadata_rides else None
        with self.exchange.logged():
            self.exchange.launch(self.plan, current, metadata)

    def _finish(self, current: BackwardPass) -> tuple[StepTotals, list[Tensor], Agreement | None]:
        """Everything that needs the other ranks, in one order on all."""
        metadata = None if self._metadata_rides else self._metadata(current)
        with self.exchange.logged():
            totals = self.exchange.finish(self.plan, current, metadata)
            sparse = self.exchange.reduce_sparse(self.plan, current, totals)
            return totals, sparse, self._agree(current, totals)

    @property
    def _metadata_rides(self) -> bool:
        """Whether the last bucket carries the step's metadata; otherwise it is sent on its own."""
        return self.plan.metadata_fits and self.exchange.comm_hook is None

    def _metadata(self, current: BackwardPass) -> StepMetadata:
        """Return what this rank tells the others about the step."""
        if current.mirrors:
            return StepMetadata(bytearray(len(self.params)), 0.0, contributes=False)
        weight = 1.0 if self.step_weight is None else self.step_weight
        current.undefined.update(i for i in self.plan.sparse if current.arrived[i] and self.params[i].grad is None)
        used = current.used_here(undefined_is_unused=self.undefined_is_unused)
        return StepMetadata(used, weight, self.wants_regroup, self._proposed is not None)

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
                as_view, large = self.options.gradient_as_bucket_view, self.plan.large
                for bucket, members in list(enumerate(self.layout))[current.next_launch :]:
                    current.fill_rest(self.params, members, bucket, large, as_view=as_view)
                    self._launch(current)
                totals, sparse, agreed = self._finish(current)
            except BaseException:
                self.discard()
                raise
            # From here on nothing can fail for lack of a peer.
            self._deliver(current, totals, sparse)
            self._pass = None
            self.exchange.drop()
            self._finish_pass(current, totals, agreed)

    def _deliver(self, current: BackwardPass, totals: StepTotals, sparse: Sequence[Tensor]) -> None:
        used, as_views = totals.used_anywhere, self.options.gradient_as_bucket_view
        for bucket, indices in enumerate(self.layout):
            current.deliver(self.params, indices, bucket, used, skip=self._dropped, as_views=as_views)
        for index, total in zip(self.plan.sparse, sparse, strict=True):
            before = current.stash.get(index)
            self.params[index].grad = current.sparse_result(index, total) if used[index] else before

    def _agree(self, current: BackwardPass, totals: StepTotals) -> Agreement | None:
        """Return what all ranks do before the next pass. Decided by shared values only, so all ranks are in it or
        none."""
        passes = self._passes + 1
        if totals.parameters_changed:
            members = self.members if self._proposed is None else self._proposed
            factor, caps = self.exchange.factor(totals), self.options.caps
            return rebuild.agree_on_change(self.group, self.plan, members, caps, factor, current.weight)
        tune = passes == TUNE_AFTER and not self.plan.caps.chosen_by_user and self.exchange.comm_hook is None
        if passes == REBUILD_AFTER or tune:
            ready = self.stats.current.ready if tune else None
            return rebuild.agree_on_order(self.group, self.plan, current.order, self._repeated, ready)
        return None

    def _finish_pass(self, current: BackwardPass, totals: StepTotals, agreed: Agreement | None) -> None:
        """Remember what the pass showed and follow what was agreed."""
        self.totals = totals
        self.stats.current.comm_end = self.stats.now()
        self.stats.end_step(
            []
            if all(totals.used_anywhere)
            else [m.name for m, used in zip(self.members, totals.used_anywhere, strict=True) if not used]
        )
        self._local.clear()
        self._armed = False
        self.step_weight = None
        self._passes += 1
        if agreed is not None:
            for param, grad in agreed.late_grads:
                param.grad = grad
            self._install(agreed.members, agreed.caps, agreed.order)
            self.stats.rebuilds += 1
        elif self._passes == TUNE_AFTER:
            self._follow()
        else:
            for index in current.last_arrival:
                if index >= 0 and index not in self._watched:
                    self._watched.add(index)
                    self._watch.promote(self.params[index])
        for callback in self.after_pass:
            callback()

    # ---- for others -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mirror_pass(self) -> None:
        """Take part in the other ranks' pass with nothing to add; own gradients stay as they are."""
        current = BackwardPass(-1, len(self.params), self.plan.num_buckets, None, True, None, frozenset())
        current.mirrors = True
        current.buffers = [pool.writable(()) for pool in self.plan.pools]
        self.exchange.drop()
        for buffer in current.buffers:
            buffer.grads.zero_()
        while current.next_launch < len(self.layout):
            self._launch(current)
        totals, _, agreed = self._finish(current)
        self.exchange.drop()
        self._finish_pass(current, totals, agreed)


def _writes_gradients(params: Sequence[nn.Parameter]) -> bool | None:
    """Return whether this backward accumulates into ``.grad``: yes; no; or into some parameters perhaps (None).

    ``torch.autograd.grad`` does not, ``backward(inputs=...)`` does for what it is given.
    """
    trainable = next((param for param in params if param.requires_grad), None)
    if trainable is None:
        return None
    with torch.enable_grad():
        view = trainable.expand_as(trainable)
    assert view.grad_fn is not None, "a view of a trainable parameter is part of the graph"
    node: Any = view.grad_fn.next_functions[0][0]
    try:
        return True if will_engine_execute_node(node) else None
    except RuntimeError:
        return False  # autograd.grad with respect to this very parameter
