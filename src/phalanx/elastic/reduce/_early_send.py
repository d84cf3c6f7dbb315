"""Sends buckets of gradients while the backward pass of a worker's last slot still goes on.

Owns the hooks of the parameters, which do nothing but in that pass, and the one step that they work for. A bucket goes
when all of its gradients are there and all before it in ``send_order`` went. Those that never fill, since a parameter
is not used, and the first one, which carries what is known only at the end, go with ``Step.reduce``.

What was sent cannot be changed any more: a gradient that changes between its backward pass and ``Step.reduce`` is an
error that names it, never a sum without the change. An error of a collective is kept for ``Step.reduce``; the pass goes
on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._partials import Partials, Push
from phalanx.elastic.reduce._reduction import BucketSums, Reduction
from phalanx.errors import CommError


class EarlySend:
    """The hooks of one model's parameters; ``watch`` lets them work for a step."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], layout: FlatLayout) -> None:
        self._params = params
        self._names = names
        self._bucket_of = {index: i for i, bucket in enumerate(layout.buckets) for index in bucket.params}
        self._sending: Sending | None = None
        for index, param in enumerate(params):
            # Weakly: the collector does not look into what torch keeps of such a hook, and this has the parameters.
            param.register_post_accumulate_grad_hook(partial(_on_gradient, ref(self), index))

    def begin(self, reduction: Reduction, partials: Partials, slot: int) -> Sending:
        """Begin the last slot of a step."""
        return Sending(self._params, self._names, self._bucket_of, reduction, partials, slot)

    @contextmanager
    def watch(self, sending: Sending | None) -> Iterator[None]:
        """Let gradients that come in the block, the last backward pass of a slot, be sent."""
        self._sending = sending
        try:
            yield
        finally:
            self._sending = None

    def came(self, index: int) -> None:
        """Take note that a gradient is there."""
        if self._sending is not None:
            self._sending.take(index)


def _on_gradient(early: ref[EarlySend], index: int, param: Tensor) -> None:
    found = early()
    if found is not None:  # else the job is gone, and its model lives on
        found.came(index)


class Sending:
    """The last slot of one step on one worker."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        bucket_of: dict[int, int],
        reduction: Reduction,
        partials: Partials,
        slot: int,
    ) -> None:
        self.push: Push = partials.begin(slot)
        self.sums = BucketSums(reduction, partials, is_async=True)
        self.error: CommError | None = None
        self._params = params
        self._names = names
        self._bucket_of = bucket_of
        buckets = reduction.pool.layout.buckets
        self._missing = [set(bucket.params) for bucket in buckets]
        self._taken: dict[int, tuple[Tensor, int]] = {}
        """Of the parameters whose buckets went: the gradient, and which version of it."""

    def take(self, index: int) -> None:
        """A gradient has come."""
        if index in self._taken:
            raise self._changed(index)
        grad = self._params[index].grad
        if self.error is not None or grad is None or grad.layout != torch.strided:
            return  # what is wrong with it is said when the slot ends
        self._missing[self._bucket_of[index]].discard(index)
        while (i := self.sums.next) and not self._missing[i]:
            grads = [param.grad for param in self._params]
            self.push.put(i, grads)
            self._taken |= {index: (grad, grad._version) for index in self._of(i) if (grad := grads[index]) is not None}
            try:
                self.sums.send()
            except CommError as error:
                self.error = error
                return

    def check(self) -> None:
        """Raise if a gradient that was sent is not what it was then."""
        for index, (grad, version) in self._taken.items():
            if self._params[index].grad is not grad or grad._version != version:
                raise self._changed(index)

    def _of(self, bucket: int) -> list[int]:
        return [index for index, i in self._bucket_of.items() if i == bucket]

    def _changed(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"the gradient of {self._names[index]} was changed after micro.backward(loss) had sent it to the other "
            "workers; change gradients after step.reduce(), or leave RunOptions(overlap=False)"
        )
