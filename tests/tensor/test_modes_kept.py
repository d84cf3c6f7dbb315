"""Modes that hold in forward hold where forward is recomputed; sub-meshes are promoted wherever tensors meet."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from phalanx.comm import DeviceMesh
from phalanx.tensor import (
    DTensor,
    ImplicitCommunicationError,
    NoShardingRule,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
    fallback_policy,
    implicit_replication,
)

pytestmark = pytest.mark.fast

T = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_replicates_implicitly_as_forward_did(reentrant: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(T, mesh, [Shard(0)]).requires_grad_()
        with implicit_replication():
            y = checkpoint(lambda a: (a * T).sin(), x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad.full_tensor(), (T * T).cos() * T)
        with pytest.raises(RuntimeError, match="implicit_replication"):
            x * T

    on_mesh(body, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_communicates_and_falls_back_as_forward_did(reentrant: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(T, mesh, [Shard(0)]).requires_grad_()
        y = checkpoint(lambda a: torch.diag_embed(a.cumsum(0)), x, use_reentrant=reentrant)
        with communication_mode("explicit"), fallback_policy("error"):
            y.sum().backward()  # its forward was allowed both
            assert x.grad is not None
            with pytest.raises(ImplicitCommunicationError):
                x.cumsum(0)
            with pytest.raises(NoShardingRule):
                torch.diag_embed(x)

    on_mesh(body, 2)


class Times(torch.autograd.Function):
    """A product whose backward returns both gradients on the larger mesh."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


def test_a_sub_mesh_is_promoted_in_lists() -> None:
    def body(mesh: DeviceMesh) -> None:
        root = distribute_tensor(T, mesh, [Shard(0), Replicate()])
        sub = distribute_tensor(T, mesh["tp"], [Shard(1)])
        for first, second in ((root, sub), (sub, root)):
            (added,) = torch._foreach_add([first], [second])
            assert added.device_mesh == mesh
            assert torch.equal(whole(added), T + T)
        changed = root.clone()
        torch._foreach_add_([changed], [sub])
        assert torch.equal(whole(changed), T + T)
        with pytest.raises(ValueError, match="not parts of one another"):
            torch._foreach_add([distribute_tensor(T, mesh["dp"], [Shard(0)])], [sub])

    on_mesh(body, 2, 2)


def test_a_sub_mesh_is_promoted_where_gradients_are_given() -> None:
    def body(mesh: DeviceMesh) -> None:
        sub = distribute_tensor(T, mesh["tp"], [Shard(1)])
        x = distribute_tensor(T, mesh, [Shard(0), Replicate()]).requires_grad_()
        (grad,) = torch.autograd.grad(x * 2, x, sub)
        assert torch.equal(whole(grad), 2 * T)
        parameter = nn.Parameter(x.detach())
        parameter.grad = sub
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == (Shard(0), Replicate())
        assert torch.equal(whole(parameter.grad), T)
        x.register_hook(lambda g: sub)
        (x * 3).sum().backward()
        assert x.grad is not None
        assert torch.equal(whole(x.grad), T)
        y = sub.detach().requires_grad_()
        (y * 2).backward(x.detach())
        assert y.grad is not None
        assert y.grad.device_mesh == mesh["tp"]
        assert torch.equal(whole(y.grad), 2 * T)
        with pytest.raises(ValueError, match="not parts of one another"):
            (y * 2).backward(distribute_tensor(T, mesh["dp"], [Shard(0)]))

    on_mesh(body, 2, 2)


def test_a_sub_mesh_is_promoted_in_backward_of_a_function() -> None:
    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, b: Any) -> Any:
            ctx.save_for_backward(b)
            return a * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.saved_tensors[0], None

    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(T, mesh, [Shard(0), Replicate()]).requires_grad_()
        sub = distribute_tensor(T, mesh["tp"], [Shard(1)])
        Given.apply(x, sub).sum().backward()
        assert x.grad is not None
        assert torch.equal(whole(x.grad), T)
        x.grad = None
        sub.requires_grad_()
        Times.apply(x, sub).sum().backward()
        assert torch.equal(whole(x.grad), T)
        assert sub.grad is not None
        assert sub.grad.placements == (Shard(1),)
        assert torch.equal(whole(sub.grad), T)

    on_mesh(body, 2, 2)


def test_selective_checkpoints_keep_what_the_users_function_computes() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def block(a: Any, b: Any) -> Any:
        return (a @ b.t()).relu() @ b

    def gradient(a: Any, b: Any) -> Any:
        checkpoint(block, a, b, use_reentrant=False, context_fn=contexts).sum().backward()
        return a.grad

    expected = gradient(T.clone().requires_grad_(), T.clone().requires_grad_())

    def body(mesh: DeviceMesh) -> None:
        # without collectives in the block: those of simulated ranks add up tensors, on whichever rank comes last
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(T, mesh, [placement]).requires_grad_()
            assert torch.equal(whole(gradient(x, distribute_tensor(T, mesh).requires_grad_())), expected)

    on_mesh(body, 2)
