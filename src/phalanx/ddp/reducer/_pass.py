"""Keeps one synchronised backward pass: its state, and how gradients move between parameters and flat buffers.

Owns nothing that outlives the pass; dropping the object drops the pass. Launching, waiting and agreement are the
reducer's. All functions run without autograd.

What the pass promises: the tensors that ``.grad`` held before it are set aside (``stash``) and never written until
``deliver``; ``restore`` puts them back, so a failed pass leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import TypeGuard

import torch
from torch import Tensor, nn

from phalanx._torch_private import foreach_copy_, foreach_mul_, storage_address
from phalanx.ddp.buckets._flat_buffer import FlatBuffer

# From this size on, a gradient is copied into its buffer the moment it is there, while it is in the cache, and its own
# memory is given back at once; below, one batched copy per bucket is cheaper.
LARGE_BYTES = 64 * 1024
_requires_grad = attrgetter("requires_grad")


@dataclass
class BackwardPass:
    task: int
    num_params: int
    num_buckets: int
    # Factor applied to gradients on their way into a buffer; None leaves them as they are.
    prescale: float | None
    # Whether what .grad held before (if it was reduced already) takes part again; see Reducer.
    mean: bool
    # This rank's weight, if the reduction is a weighted mean.
    weight: float | None
    local: frozenset[int]
    stash: dict[int, Tensor] = field(default_factory=dict)
    arrived: bytearray = field(init=False)
    order: list[int] = field(default_factory=list)
    pending: list[list[int]] = field(init=False)
    missing: list[int] = field(default_factory=list)
    buffers: list[FlatBuffer] = field(default_factory=list)
    last_arrival: list[int] = field(init=False)
    in_buffer: set[int] = field(default_factory=set)
    # Autograd reached these without a gradient for them: a function's backward returned None.
    undefined: set[int] = field(default_factory=set)
    # Per bucket, if it has small dense gradients only: the tensors that autograd made, in the order of arrival. Held
    # so that reading ``.grad`` again finds the same Python objects, which is several times cheaper.
    own: dict[int, list[Tensor]] = field(default_factory=dict)
    # Buckets whose views are the gradients from the beginning: autograd adds into them; see ``lend``.
    lent: set[int] = field(default_factory=set)
    # By bucket, views that take gradients on their way out in place of the buffer's; see ``copies_to_fill``.
    copies: dict[int, list[Tensor]] = field(default_factory=dict)
    next_launch: int = 0
    # Whether it is known that parameters get gradients; if not, a pass without any is none.
    certain: bool = True
    # Whether this rank only mirrors the pass of others (join).
    mirrors: bool = False

    def __post_init__(self) -> None:
        self.arrived = bytearray(self.num_params)
        self.pending = [[] for _ in range(self.num_buckets)]
        self.last_arrival = [-1] * self.num_buckets

    def set_aside(self, params: Sequence[nn.Parameter], skip: frozenset[int]) -> None:
        """Take the gradients that are there now, so that this pass starts from none."""
        for index, param in enumerate(params):
            grad = param.grad
            if grad is not None and index not in skip:
                self.stash[index] = grad
                param.grad = None

    def storages_in_use(self) -> set[int]:
        """Return the memory that gradients set aside lie in."""
        return {storage_address(grad.untyped_storage()) for grad in self.stash.values() if not grad.is_sparse}

    def used_here(self, *, undefined_is_unused: bool) -> bytearray:
        """Return a byte per parameter: 1 if this rank has something to contribute for it."""
        used = bytearray(self.arrived)
        if undefined_is_unused:
            for index in self.undefined:
                used[index] = 0
        for index in self.local & self.stash.keys():
            used[index] = 1
        return used

    def restore(self, params: Sequence[nn.Parameter], skip: frozenset[int]) -> None:
        """As if the pass had never been."""
        for index, param in enumerate(params):
            if index not in skip:
                param.grad = self.stash.get(index)

    def forget(self) -> None:
        """Let go of all memory: the error's traceback, which a broken group may keep, leads to this object."""
        self.buffers = []
        self.copies = {}
        self.own.clear()
        self.stash.clear()

    def earlier(self, index: int) -> Tensor | None:
        """Return what ``.grad`` held before the pass and what has to be reduced with the new gradient.

        A mean may take in an already reduced value again (all ranks have the same: their mean is that value), which
        is also what PyTorch does bit for bit. A sum may not.
        """
        return self.stash.get(index) if self.mean or index in self.local else None

    def take_small(
        self,
        arrivals: Sequence[int],
        bucket_of: Sequence[int],
        large: Sequence[bool],
        repeated: AbstractSet[int],
    ) -> bool:
        """Note many arrivals in few calls, if they are the common case: small, of one bucket, each the first."""
        buckets = set(map(bucket_of.__getitem__, arrivals))
        if len(buckets) != 1 or min(arrivals) < 0 or any(map(large.__getitem__, arrivals)):
            return False
        (bucket,) = buckets
        distinct = set(arrivals)
        again = any(map(self.arrived.__getitem__, arrivals)) or len(distinct) != len(arrivals)
        if bucket < 0 or again or not repeated.isdisjoint(distinct):
            return False
        for index in arrivals:
            self.arrived[index] = 1
        self.order.extend(arrivals)
        self.pending[bucket].extend(arrivals)
        self.missing[bucket] -= len(arrivals)
        self.last_arrival[bucket] = arrivals[-1]
        return True

    def lend(self, params: Sequence[nn.Parameter], members: Sequence[int], bucket: int) -> None:
        """Make the views of a bucket of small gradients the gradients, zeros yet, that autograd adds to.

        For 2,000 small ones that takes half of the time of copying and replacing what autograd made. It hides which
        ones autograd reached without a gradient, so it is for passes that need not know.
        """
        buffer = self.buffers[bucket]
        buffer.grads.zero_()
        for index, view in zip(members, buffer.views, strict=True):
            params[index].grad = view
        self.lent.add(bucket)

    def fill(self, param: nn.Parameter, index: int, view: Tensor) -> None:
        """Copy one parameter's contribution into its view; zeros if it has none."""
        new, old = param.grad, self.earlier(index)
        if new is None and self.arrived[index]:
            self.undefined.add(index)
        if new is None and old is None:
            view.zero_()
            return
        new, old = _dense(new), _dense(old)
        if new is not None and old is not None:
            torch.add(old, new, out=view)
            if self.prescale is not None:
                view.mul_(self.prescale)
        else:
            only = new if new is not None else old
            assert only is not None
            if self.prescale is None:
                view.copy_(only)
            else:
                torch.mul(only, self.prescale, out=view)

    def fill_now(self, param: nn.Parameter, index: int, bucket: int, place: int, as_view: bool) -> None:
        """Copy a large gradient at once and give its own memory back by making the buffer's view the gradient.

        Where it goes to a copy in another dtype, the buffer holds nothing yet: there is no gradient until ``deliver``.
        """
        buffer = self.buffers[bucket]
        copies = self.copies.get(bucket)
        view = buffer.views[place] if copies is None else copies[place]
        self.fill(param, index, view)
        self.in_buffer.add(index)
        if index not in self.stash:
            param.grad = None if copies is not None else view if as_view else buffer.fresh_view(param, place)

    def keep_in_buffer(self, param: nn.Parameter, index: int, bucket: int, place: int, as_view: bool) -> None:
        """Move a large gradient to its buffer as it is, to be scaled at the end: the order is still being learned.

        Its own memory is given back; if another gradient arrives for it, autograd adds that to the buffer.
        """
        grad = param.grad
        if grad is not None and index not in self.stash and not (grad.is_sparse or grad.requires_grad):
            buffer = self.buffers[bucket]
            buffer.views[place].copy_(grad)
            param.grad = buffer.views[place] if as_view else buffer.fresh_view(param, place)

    def fill_pending(self, params: Sequence[nn.Parameter], bucket: int, place_of: Sequence[int]) -> None:
        """``fill`` for all the small ones of a bucket: two calls instead of one per parameter."""
        buffer, pending = self.buffers[bucket], self.pending[bucket]
        if bucket in self.copies:  # few, beside large ones
            for index in pending:
                self.fill(params[index], index, self.copies[bucket][place_of[index]])
            self.pending[bucket] = []
            return
        grads: list[Tensor] = [params[index].grad for index in pending]  # type: ignore[misc]  # None is handled below
        places = [place_of[index] for index in pending]
        is_whole = places == buffer.places
        views = buffer.views if is_whole else [buffer.views[place] for place in places]
        if bucket in self.lent and _are_the_same(grads, views):
            self._scale(buffer, views)
        elif self.stash or not _copy_all(views, grads, buffer.stacked if is_whole else None):
            for index, view in zip(pending, views, strict=True):
                self.fill(params[index], index, view)
        elif views:
            if not any(map(_requires_grad, grads)):
                self.own[bucket] = grads
            self._scale(buffer, views)
        self.pending[bucket] = []

    def _scale(self, buffer: FlatBuffer, views: list[Tensor]) -> None:
        if self.prescale is None or not views:
            return
        if len(views) == len(buffer.views):  # one pass over the flat memory
            buffer.grads.mul_(self.prescale)
        else:
            foreach_mul_(views, self.prescale)

    def fill_rest(
        self,
        params: Sequence[nn.Parameter],
        members: Sequence[int],
        bucket: int,
        large: Sequence[bool],
        *,
        as_view: bool,
    ) -> None:
        """At the end of backward, take every member that is not in its buffer yet, with whatever it has.

        Large gradients go at once, so that their memory is back before the next bucket takes its own.
        """
        if not self.missing[bucket]:
            return
        queued = self.in_buffer.union(self.pending[bucket])
        for place, index in enumerate(members):
            if index not in queued:
                if large[index] and params[index].grad is not None:
                    self.fill_now(params[index], index, bucket, place, as_view)
                else:
                    self.pending[bucket].append(index)

    def unstash(self, params: Sequence[nn.Parameter], arrived: Sequence[int]) -> None:
        """Gradients that came before the pass was known to have begun are new ones, not ones of before."""
        for index in arrived:
            if index in self.stash:
                params[index].grad = self.stash.pop(index)

    def sparse_contribution(self, param: nn.Parameter, index: int) -> Tensor | None:
        """Return what this rank adds for a parameter with sparse gradients, scaled as the reduction wants it."""
        new, old = param.grad, self.earlier(index)
        total = new if old is None else old if new is None else old + new
        if total is None or self.weight is None:
            return total
        return total * self.weight

    def sparse_result(self, index: int, total: Tensor) -> Tensor:
        """Return the new ``.grad``: the reduced one, plus what was reduced before and took no part now."""
        before = self.stash.get(index)
        return total if before is None or self.earlier(index) is not None else before + total

    def take_result(self, bucket: int, result: object, rank: int) -> None:
        """Put what a communication hook returned where the gradients are."""
        buffer = self.buffers[bucket].grads
        value = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
        if not isinstance(value, Tensor) or value.numel() != buffer.numel():
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(
                f"rank {rank}: the communication hook's future for bucket {bucket} must hold one tensor "
                f"of {buffer.numel()} elements, got {got}"
            )
        if value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value.reshape(-1))

    def deliver(
        self,
        params: Sequence[nn.Parameter],
        members: Sequence[int],
        bucket: int,
        used: Sequence[bool],
        *,
        skip: frozenset[int],
        as_views: bool,
    ) -> None:
        """Hand the reduced gradients of one bucket to its parameters.

        Where a gradient was there before, its tensor gets the new value in place. Otherwise large ones (or all, with
        ``as_views``) become views of the buffer, and small ones are copied back into autograd's own tensors.
        """
        buffer = self.buffers[bucket]
        if as_views and not self.stash and not skip and all(used):
            if bucket in self.lent and _are_the_same([params[index].grad for index in members], buffer.views):
                return
            for index, view in zip(members, buffer.views, strict=True):
                params[index].grad = view
            return
        if not (as_views or self.stash or skip or self.in_buffer) and all(used):
            own_grads = [params[index].grad for index in members]
            if _are_the_same(own_grads, self.own.get(bucket, ())) or _all_own(own_grads):
                foreach_copy_(own_grads, buffer.views)
                return
        targets, sources = [], []
        for place, index in enumerate(members):
            param, view, before = params[index], buffer.views[place], self.stash.get(index)
            if index in skip:
                continue
            if not used[index]:
                param.grad = before
            elif before is not None:
                if before.is_sparse:
                    param.grad = view.clone()
                    continue
                param.grad = before
                if self.earlier(index) is None:
                    before.add_(view)  # reduced in an earlier pass and not again in this one
                else:
                    targets.append(before)
                    sources.append(view)
            elif as_views:
                param.grad = view
            elif index in self.in_buffer:
                if bucket in self.copies:
                    param.grad = buffer.fresh_view(param, place)
            else:
                own = param.grad
                if own is None or own.is_sparse or own.requires_grad or own.nbytes >= LARGE_BYTES:
                    param.grad = buffer.fresh_view(param, place)
                else:
                    targets.append(own)
                    sources.append(view)
        if targets:
            foreach_copy_(targets, sources)


def _all_own(grads: Sequence[Tensor | None]) -> TypeGuard[list[Tensor]]:
    """Return whether all are small dense tensors that autograd made, which can take the result as they are."""
    return all(
        grad is not None and grad.nbytes < LARGE_BYTES and not (grad.is_sparse or grad.requires_grad) for grad in grads
    )


def _are_the_same(left: Sequence[Tensor | None], right: Sequence[Tensor]) -> TypeGuard[list[Tensor]]:
    return len(left) == len(right) and all(map(is_, left, right))


def _copy_all(views: list[Tensor], grads: list[Tensor], stacked: Tensor | None) -> bool:
    """Copy all at once; False if one is missing or sparse, and then nothing can be said about the views.

    Concatenating, where ``stacked`` is the memory of all views, takes half of the time.
    """
    try:
        if stacked is None:
            foreach_copy_(views, grads)
        else:
            torch.cat(grads, out=stacked)
    except (TypeError, RuntimeError):
        return False
    return True


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad
