"""Losses, convolutions and other layers that stay where their tensors are, against one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh

from phalanx.tensor import Replicate, Shard, distribute_tensor, fallback_counts
from phalanx.tensor.debug import CommDebugMode

pytestmark = pytest.mark.fast

LOSSES: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": lambda x, y, **kw: F.huber_loss(x, y, delta=0.7, **kw),
    "soft_margin": lambda x, y, **kw: F.soft_margin_loss(x, torch.sign(y), **kw),
    "kl_div": lambda x, y, **kw: F.kl_div(x.log_softmax(1), y.softmax(1), **kw),
    "bce": lambda x, y, **kw: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **kw),
    "bce_with_logits": lambda x, y, **kw: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **kw),
    "hinge": lambda x, y, **kw: F.hinge_embedding_loss(x, torch.sign(y), **kw),
    "margin_ranking": lambda x, y, **kw: F.margin_ranking_loss(x, y, torch.sign(y), **kw),
    "poisson": F.poisson_nll_loss,
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # torch's advice on kl_div
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_cut_batch_send_at_most_a_number(name: str, reduction: str) -> None:
    torch.manual_seed(8)
    plain, target = torch.randn(7, 5), torch.randn(7, 5)
    loss = LOSSES[name]

    def body(mesh: Any) -> None:
        reference = plain.clone().requires_grad_()
        expected = loss(reference, target, reduction=reduction)
        expected.sum().backward()
        x = distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        y = distribute_tensor(target, mesh, [Shard(0)], src_data_rank=None)
        before = sum(fallback_counts().values())
        with CommDebugMode() as seen:
            result = loss(x, y, reduction=reduction)
            result.sum().backward()
        assert sum(fallback_counts().values()) == before, "computed replicated"
        assert seen.get_total_bytes() <= 8
        torch.testing.assert_close(result.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), reference.grad)

    on_mesh(body, 3)


def conv(
    func: Any, weight: tuple[int, ...], bias: int, **options: Any
) -> tuple[Any, tuple[int, ...], int, dict[str, Any]]:
    return func, weight, bias, options


CONVOLUTIONS = {
    "plain": conv(F.conv2d, (8, 4, 3, 3), 8, padding=1),
    "two groups": conv(F.conv2d, (8, 2, 3, 3), 8, groups=2),
    "depthwise": conv(F.conv2d, (4, 1, 3, 3), 4, groups=4, stride=2),
    "transposed": conv(F.conv_transpose2d, (4, 6, 2, 2), 6, stride=2),
    "transposed in groups": conv(F.conv_transpose2d, (4, 3, 2, 2), 6, groups=2, output_padding=1, stride=2),
    "by position": conv(lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 2), (8, 2, 3, 3), 8),
}
WAYS: dict[str, tuple[list[Any], list[Any]]] = {  # of the input and of the weight
    "batch": ([Shard(0), Replicate()], [Replicate(), Replicate()]),
    "channels": ([Replicate(), Shard(1)], [Replicate(), Shard(0)]),
    "other channels": ([Replicate(), Shard(1)], [Replicate(), Shard(1)]),
    "batch and channels": ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    "channels twice": ([Shard(1), Shard(1)], [Shard(0), Shard(0)]),
    "whole input": ([Replicate(), Replicate()], [Shard(0), Shard(1)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, way: str) -> None:
    func, shape, bias, options = CONVOLUTIONS[name]
    torch.manual_seed(9)
    given = [torch.randn(2, 4, 6, 6), torch.randn(shape), torch.randn(bias)]
    plain = [t.clone().requires_grad_() for t in given]
    expected = func(*plain, **options)
    (expected**2).sum().backward()
    placements = [*WAYS[way], [Replicate(), Replicate()]]

    def body(mesh: Any) -> None:
        before = sum(fallback_counts().values())
        mine = [
            distribute_tensor(t, mesh, p, src_data_rank=None).requires_grad_()
            for t, p in zip(given, placements, strict=True)
        ]
        result = func(*mine, **options)
        assert sum(fallback_counts().values()) == before, "computed replicated"
        torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-4, atol=1e-4)
        (result**2).sum().backward()
        for ours, reference in zip(mine, plain, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), reference.grad, rtol=1e-3, atol=1e-3)

    on_mesh(body, 2, 2)


def test_groups_stay_with_their_channels() -> None:
    """A depthwise convolution cut by channel sends nothing, forward or backward."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(2, 4, 6, 6), mesh, [Shard(1)]).requires_grad_()
        w = distribute_tensor(torch.randn(4, 1, 3, 3), mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as seen:
            y = F.conv2d(x, w, groups=4)
            y.backward(torch.ones_like(y))
        assert y.placements == (Shard(1),)
        assert not seen.get_total_counts()

    on_mesh(body, 2)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_an_embedding_cut_by_columns(mode: str) -> None:
    torch.manual_seed(10)
    table, indices, offsets = torch.randn(9, 5), torch.randint(0, 9, (7,)), torch.tensor([0, 2, 2, 6])
    plain = table.clone().requires_grad_()
    expected = F.embedding_bag(indices, plain, offsets, mode=mode)
    (expected**2).sum().backward()

    def body(mesh: Any) -> None:
        weight = distribute_tensor(table, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        where = [distribute_tensor(t, mesh, src_data_rank=None) for t in (indices, offsets)]
        with CommDebugMode() as seen:
            result = F.embedding_bag(where[0], weight, where[1], mode=mode)
        assert mode == "max" or (result.placements == (Shard(1),) and not seen.get_total_counts())
        torch.testing.assert_close(result.full_tensor(), expected)
        (result**2).sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)

    on_mesh(body, 2)


def test_a_rule_that_misreads_a_call_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its promise is compared with what torch makes of the parts, before anything is computed."""
    from phalanx.tensor.layout._placement import REPLICATE
    from phalanx.tensor.ops._registry import OPERATORS
    from phalanx.tensor.ops._rule import Call, Choice, Sharding

    def wrong(call: Call) -> Sharding:
        return Sharding([Choice((Shard(1),), (Shard(0),)), Choice((REPLICATE,), (REPLICATE,))])

    monkeypatch.setitem(OPERATORS, "trunc", dataclasses.replace(OPERATORS["trunc"], rule=wrong))

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)])
        with pytest.raises(AssertionError, match="rule for trunc promises"):
            x.trunc()

    on_mesh(body, 2)
