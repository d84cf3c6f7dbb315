"""Gradients of replicas that met different work: summed once for all uses, scattered where cut, never stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import Tensor

from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.tensor.debug import CommDebugMode

pytestmark = pytest.mark.fast


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(mesh: Any, placements: Any, plain: Tensor) -> DTensor:
    return distribute_tensor(plain, mesh, placements, src_data_rank=None).requires_grad_()


def backward(loss: Any) -> dict[str, int]:
    with CommDebugMode() as seen:
        loss.backward()
    return {str(name): count for name, count in seen.get_comm_counts().items()}


def test_the_uses_of_one_tensor_share_one_sum() -> None:
    """Query, key and value of one activation; a weight in every step of a recurrence."""
    x0, weights = values(4, 6, seed=0), [values(6, 6, seed=n) for n in (1, 2, 3)]

    def attend(x: Any, ws: Any) -> Any:
        q, k, v = (F.linear(x, w) for w in ws)
        return (q * k * v).sum()

    def recur(x: Any, w: Any) -> Any:
        for _ in range(5):
            x = (x @ w).tanh()
        return x.sum()

    def body(mesh: Any) -> None:
        x, ws = leaf(mesh, [Replicate()], x0), [leaf(mesh, [Shard(0)], w) for w in weights]
        px, pws = x0.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
        attend(px, pws).backward()
        assert backward(attend(x, ws).redistribute(placements=[Replicate()])) == {"all_reduce": 1}
        rows, w = leaf(mesh, [Shard(0)], x0), leaf(mesh, [Replicate()], weights[0])
        prows, pw = x0.clone().requires_grad_(), weights[0].clone().requires_grad_()
        recur(prows, pw).backward()
        assert backward(recur(rows, w).redistribute(placements=[Replicate()])) == {"all_reduce": 1}
        for ours, plain in [(x, px), *zip(ws, pws, strict=True), (rows, prows), (w, pw)]:
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)

    on_mesh(body, 2)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_what_was_gathered_for_an_operation_is_scattered_back(shape: tuple[int, ...]) -> None:
    """A weight cut over the ranks that also cut the batch: half the bytes of a sum that is then cut."""
    x0, w0 = values(8, 6, seed=0), values(4, 6, seed=1)

    def body(mesh: Any) -> None:
        x = leaf(mesh, [Shard(0)] * mesh.ndim, x0)
        w = leaf(mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)], w0)
        px, pw = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        (F.linear(px, pw) ** 2).sum().backward()
        loss = (F.linear(x, w) ** 2).sum().redistribute(placements=[Replicate()] * mesh.ndim)
        with CommDebugMode() as seen:
            loss.backward()
        counts = {str(name): count for name, count in seen.get_comm_counts().items()}
        assert counts == {"reduce_scatter_tensor": 1, **({"all_reduce": 1} if mesh.ndim > 1 else {})}
        for ours, plain in ((x, px), (w, pw)):
            assert ours.grad is not None
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)

    on_mesh(body, *shape)


def in_place(x: Any, use: Callable[[Any], Any]) -> Any:
    y = x * 2
    first = use(y)
    y.mul_(3)
    return first + use(y)


def cut_off(x: Any, use: Callable[[Any], Any]) -> Any:
    y = x * 2
    first = use(y)
    y.detach_().requires_grad_()
    (gradient,) = torch.autograd.grad(use(y), y)
    return first + (gradient * x).sum()


def without_grad(x: Any, use: Callable[[Any], Any]) -> Any:
    y = x * 2
    with torch.no_grad():
        first = use(y)
    return first.detach() + use(y)


def twice(x: Any, use: Callable[[Any], Any]) -> Any:
    y = x * 2
    (gradient,) = torch.autograd.grad(use(y), y, create_graph=True)
    return use(y) + (gradient**2).sum()


def hooked(x: Any, use: Callable[[Any], Any]) -> Any:
    y = x * 2
    first = use(y)
    y.register_hook(lambda g: g * 5)
    return first + use(y)


def new_data(x: Any, use: Callable[[Any], Any]) -> Any:
    first = use(x)
    x.data = x.data * 3
    return first.detach() + use(x)


def stepped(x: Any, use: Callable[[Any], Any]) -> Any:
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        use(x).backward()
        optimizer.step()
    x.grad = None
    return use(x)


def kept_graph(x: Any, use: Callable[[Any], Any]) -> Any:
    loss = use(x)
    loss.backward(retain_graph=True)
    return loss + use(x)


WAYS = [in_place, cut_off, without_grad, twice, hooked, new_data, stepped, kept_graph]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("cut", [Replicate(), Shard(0)], ids=["shared", "gathered"])
def test_what_happens_between_two_uses_counts(way: Any, cut: Any) -> None:
    x0, w0 = values(4, 6, seed=0), values(6, 6, seed=1)

    def run(x: Any, w: Any) -> Any:
        way(x, lambda t: (F.linear(w, t).tanh() ** 2).sum()).backward()
        return x.grad

    def body(mesh: Any) -> None:
        expected = run(x0.clone().requires_grad_(), w0)
        x = leaf(mesh, [cut], x0)
        found = run(x, distribute_tensor(w0, mesh, [Shard(0)], src_data_rank=None))
        torch.testing.assert_close(found.full_tensor(), expected)

    on_mesh(body, 2)
