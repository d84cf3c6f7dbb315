"""Parameters without a gradient, on all ranks or on some: ``.grad`` is what PyTorch's wrapper leaves, None or not."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.test_parity_torch import join_torch
from phalanx.ddp import DistributedDataParallel
from processes import run_processes

pytestmark = pytest.mark.timeout(240)
FLAGS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


class WithoutGradient(torch.autograd.Function):
    """Takes a weight and has no gradient for it: autograd reaches the weight with an undefined one."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Parts(nn.Module):
    """``used`` always gets a gradient; the others are left out, or reached with an undefined one, as told per call."""

    def __init__(self, size):
        super().__init__()
        self.used = nn.Linear(size, size, bias=False)
        self.other = nn.Linear(size, size, bias=False)

    def forward(self, x, how):
        y = self.used(x)
        if how == "used":
            return y + self.other(x)
        return WithoutGradient.apply(y, self.other.weight) if how == "undefined" else y


# What each of the two ranks does with ``other``, and whether torch takes it without a flag.
CASES = {
    "undefined everywhere": (("undefined", "undefined"), True),
    "undefined on one": (("undefined", "used"), True),
    "left out everywhere": (("left out", "left out"), False),
    "left out on one": (("left out", "used"), False),
    "undefined and left out": (("undefined", "left out"), False),
}


def grads_of(kind, rank, case, flags, view, keep, size):
    torch.manual_seed(0)
    model = kind(Parts(size), gradient_as_bucket_view=view, **flags)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    seen = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=not keep)
        # With a graph that may change, the first step gives it a gradient, which then has to be left alone.
        how = "used" if keep and not step and "static_graph" not in flags else case[rank]
        model(torch.full((2, size), rank + step + 1.0), how).sum().backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return seen, [p.detach() for p in model.parameters()]


def _compare(worker) -> None:
    join_torch(worker)
    for (name, (case, without_flag)), flags, view, keep, size in itertools.product(
        CASES.items(), FLAGS, (False, True), (False, True), (4, 160)
    ):
        if not flags and not without_flag:
            continue  # torch raises in the next forward; ours just works: test_reduction.py
        told = f"{name}, {flags}, views {view}, keep {keep}, size {size}"
        ours, our_weights = grads_of(DistributedDataParallel, worker.rank, case, flags, view, keep, size)
        theirs, their_weights = grads_of(TorchDDP, worker.rank, case, flags, view, keep, size)
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for left, right in zip(mine, other, strict=True):
                assert (left is None) == (right is None), f"{told}, step {step}: {left} but torch has {right}"
                if left is not None:
                    assert torch.equal(left, right), f"{told}, step {step}"
        for left, right in zip(our_weights, their_weights, strict=True):
            assert torch.equal(left, right), told
    dist.destroy_process_group()


def _without_warnings(worker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warn about flags that were not needed
        _compare(worker)


def test_gradients_are_none_where_torch_leaves_them_none() -> None:
    run_processes(2, _without_warnings, timeout=200.0)
