"""Planning is nobody's business: the first call of a function looks to modes like every later one."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from phalanx.tensor import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast

_sizes = itertools.count(40)  # no two tests share a shape, nor what was planned for it


class Dispatched(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(f"{func} on {[t.device.type for t in tree_leaves(result) if isinstance(t, Tensor)]}")
        return result


class Called(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Any] = {
    "matmul": lambda x, w: x @ w,
    "moved matmul": lambda x, w: x @ x.T,
    "add": lambda x, w: x + w,
    "layer_norm": lambda x, w: F.layer_norm(x, (x.shape[1],), w[0], w[1]),
    "reshape": lambda x, w: x.reshape(-1),
    "contiguous": lambda x, w: x.T.contiguous(),
    "rows": lambda x, w: x[:3].permute(1, 0).reshape(3, -1),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.argmax(x, 1)),
    "softmax over the cut": lambda x, w: x.softmax(0),
    "cat": lambda x, w: torch.cat((x, w), 1),
    "split": lambda x, w: torch.split(x, 1, 0),
    "sum": lambda x, w: x.sum(0, keepdim=True),
    "attention": lambda x, w: F.scaled_dot_product_attention(*(x.view(x.shape[0], 1, 1, -1),) * 3),
    "single rows": lambda x, w: x[:2].T.redistribute(placements=[Shard(1)]) * 2,
    "moved and expanded": lambda x, w: x[:2, :1].expand(2, 3) @ w[:3, :3],
    "redistribute": lambda x, w: x.redistribute(placements=[Shard(1)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_modes_see_nothing_of_a_plan(name: str) -> None:
    size = next(_sizes)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(size, size), mesh, [Shard(0)])
        w = distribute_tensor(torch.randn(size, size), mesh, [Replicate()])
        with Dispatched() as noted:
            CALLS[name](x, w)
        assert noted.seen
        assert [text for text in noted.seen if "meta" in text] == []

    on_mesh(body, 2)


# a mode sees what simulated ranks do inside of a redistribution, which depends on who comes last
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("redistribute", "single rows")])
def test_function_modes_see_the_first_call_as_they_see_the_second(name: str) -> None:
    size = next(_sizes)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(size, size), mesh, [Shard(0)])
        w = distribute_tensor(torch.randn(size, size), mesh, [Replicate()])
        seen = []
        for _ in range(2):
            with Called() as noted:
                CALLS[name](x, w)
            seen.append(noted.seen)
        assert seen[0] == seen[1]

    on_mesh(body, 2)


def test_flops_are_counted_once() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(6, 10), mesh)
        for _ in range(2):
            with FlopCounterMode(display=False) as counted:
                x @ w
            assert counted.get_total_flops() == 2 * 4 * 6 * 10

    on_mesh(body, 2)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_selective_checkpointing_from_the_first_call(placement: Any) -> None:
    size = next(_sizes)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.rand(4, size), mesh, [Shard(0)])
        w = distribute_tensor(torch.randn(size, size), mesh, [placement]).requires_grad_()
        saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        for _ in range(2):
            y = checkpoint(lambda a: torch.sigmoid(a @ w), x, use_reentrant=False, context_fn=saved)
            (found,) = torch.autograd.grad(y.sum(), w)
            (expected,) = torch.autograd.grad(torch.sigmoid(x @ w).sum(), w)
            torch.testing.assert_close(whole(found), whole(expected))

    on_mesh(body, 2)


def test_a_default_device_does_not_reach_plans() -> None:
    size = next(_sizes)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(size, 3), mesh, [Shard(0)])
        with torch.device("meta"):
            total = (x * 2).sum()
        assert whole(total).item() == size * 6

    on_mesh(body, 2)
