"""Ways in and out of the graph that would show one rank's part: edges, hooks, batches, contributions to a maximum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import on_mesh
from torch.autograd.graph import GradientEdge

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast


def test_gradient_edges_are_refused() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        y = x * 2
        loss = (y * y).sum()
        with pytest.raises(NotImplementedError, match=r"get_gradient_edge of float32\[4\].*the DTensor itself"):
            torch.autograd.graph.get_gradient_edge(y)
        edge = GradientEdge(y.grad_fn, 0)
        with pytest.raises(NotImplementedError, match="Give it the tensor itself"):
            torch.autograd.grad(loss, edge)
        with pytest.raises(NotImplementedError, match="Give it the tensor itself"):
            torch.autograd.grad(edge, x, grad_outputs=y.detach())
        (found,) = torch.autograd.grad(loss, y)
        assert found.full_tensor().tolist() == [4.0] * 4

    on_mesh(body, 2)


def test_gradient_edges_of_plain_tensors_are_as_ever() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    edge = torch.autograd.graph.get_gradient_edge(y)
    assert torch.autograd.grad((y * y).sum(), edge)[0].tolist() == [4.0] * 3


def test_what_a_post_accumulate_hook_returns_is_dropped() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        seen: list[Any] = []
        x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p) or "anything")
        (3 * x).sum().backward()
        assert x.grad is not None
        assert x.grad.full_tensor().tolist() == [6.0] * 4
        assert seen[0] is x

    on_mesh(body, 2)


def test_the_usual_optimizer_in_a_hook_steps_in_backward() -> None:
    def body(mesh: Any) -> None:
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def step(parameter: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
        weight.sum().backward()
        assert weight.grad is None
        assert weight.full_tensor().tolist() == [0.5] * 4

    on_mesh(body, 2)


def test_batches_of_gradients_are_refused() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        y = x * 2
        rows = distribute_tensor(torch.eye(4), mesh, [Replicate()])
        with pytest.raises(NotImplementedError, match="is_grads_batched"):
            torch.autograd.grad(y, x, rows, is_grads_batched=True)
        with pytest.raises(NotImplementedError, match=r"is_grads_batched|vmap|torch\.func"):
            torch.autograd.functional.jacobian(lambda t: t * 2, x, vectorize=True)
        one_by_one = torch.autograd.functional.jacobian(lambda t: t * 2, x)
        assert torch.equal(one_by_one.full_tensor(), 2 * torch.eye(4))

    on_mesh(body, 2)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_contributions_to_a_maximum_have_no_gradient(op: str) -> None:
    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.ones(2), mesh, [Partial(op)]).requires_grad_()
        for options in ({}, {"grad_placements": [Replicate()]}, {"grad_placements": [Partial()]}):
            part = x.to_local(**options)
            assert part.tolist() == [1.0, 1.0]
            with pytest.raises(RuntimeError, match=rf"to_local\(\) of float32\[2\] \[tp:P\({op}\)\].*no gradient"):
                (part * (mesh.get_rank() + 1)).sum().backward()
        assert x.grad is None
        with torch.no_grad():
            assert not (x.to_local() * 2).requires_grad
        y = DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [Partial(op)])  # not a leaf
        with pytest.raises(RuntimeError, match="no gradient"):
            y.to_local().sum().backward()
        assert x.detach().to_local().sum() == 2

    on_mesh(body, 2)


def test_parts_of_sums_keep_their_gradient() -> None:
    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.ones(2), mesh, [Partial()]).requires_grad_()
        (x.to_local() * 3).sum().backward()
        assert x.grad is not None
        assert x.grad.full_tensor().tolist() == [3.0, 3.0]
        assert (x * 2).to_local() is not None
        with torch.no_grad():
            assert not (x.to_local() + 1).requires_grad

    on_mesh(body, 2)
