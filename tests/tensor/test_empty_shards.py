"""Ranks that hold nothing of a batch take part in everything: gradients of weights and masks are as on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import coverage
import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from phalanx.tensor import Replicate, Shard, distribute_tensor

# Of three ranks the last holds nothing of a batch of two. Shapes: the batch, then weights, which are replicated.
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "attention, trained mask": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        [(2, 4, 3, 5), (3, 3)],
    ),
    "attention, mask of each head": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        [(2, 4, 3, 5), (4, 3, 3)],
    ),
    "attention, other keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),
        [(2, 4, 3, 5), (1, 4, 6, 5), (1, 4, 6, 5)],
    ),
    "attention of three dims, trained mask": (
        lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        [(2, 3, 5), (3, 3)],
    ),
    "linear": (F.linear, [(2, 3), (4, 3), (4,)]),
    "linear of three dims": (F.linear, [(2, 5, 3), (4, 3), (4,)]),
    "bilinear": (F.bilinear, [(2, 3), (2, 3), (4, 3, 3), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), [(2, 3), (3,), (3,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), [(2, 3), (3,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [(2, 4, 3), (4,), (4,)],
    ),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(2, 4, 3), (4,), (4,)]),
    "conv1d": (F.conv1d, [(2, 3, 5), (4, 3, 2), (4,)]),
    "conv2d": (F.conv2d, [(2, 3, 5, 4), (4, 3, 2, 2), (4,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 5, 4), (3, 4, 2, 2), (4,)]),
    "prelu": (F.prelu, [(2, 3), (3,)]),
    "matmul": (torch.matmul, [(2, 3), (3, 4)]),
    "matmul, batched": (torch.matmul, [(2, 5, 3), (3, 4)]),
    "bmm": (lambda x, w: torch.bmm(x, w.expand(2, -1, -1)), [(2, 5, 3), (3, 4)]),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), [(2, 3), (3, 4), (4,)]),
    "addmv": (lambda x, v, b: torch.addmv(b, x, v), [(2, 3), (3,), (1,)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w.expand(2, -1, -1)), [(2, 5, 3), (3, 4), (5, 4)]),
    "addcmul": (torch.addcmul, [(2, 3), (3,), (3,)]),
    "lerp": (torch.lerp, [(2, 3), (3,), (3,)]),
    "einsum": (lambda x, w: torch.einsum("bi,io->bo", x, w), [(2, 3), (3, 4)]),
    "einsum of three": (lambda x, w, v: torch.einsum("bi,io,o->b", x, w, v), [(2, 3), (3, 4), (4,)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), [(2, 3), (3, 4)]),
    "outer": (torch.outer, [(2,), (3,)]),
    "kron": (torch.kron, [(2, 3), (2, 2)]),
    "cdist": (torch.cdist, [(2, 3), (4, 3)]),
    "where": (lambda x, w: torch.where(x > 0, x, w), [(2, 3), (3,)]),
    "cat": (lambda x, w: torch.cat((x, w.expand(2, -1)), 1), [(2, 3), (4,)]),
    "embedding": (
        lambda x, w: F.embedding((x > 0).long(), w),
        [(2, 3), (5, 4)],
    ),
    "index_select": (lambda x, w: w.index_select(0, (x > 0).long()), [(2,), (5, 4)]),
    "gather": (lambda x, w: w.expand(2, -1).gather(1, (x > 0).long()), [(2, 3), (4,)]),
    "cross_entropy with weight": (
        lambda x, w: F.cross_entropy(x * w, (x[:, 0] > 0).long(), w.detach()),
        [(2, 3), (3,)],
    ),
    "soft targets": (lambda x, w: F.cross_entropy(x, w.softmax(0).expand(2, -1)), [(2, 3), (3,)]),
    "mse_loss": (lambda x, w: F.mse_loss(x, w.expand(2, -1)), [(2, 3), (3,)]),
    "cosine_similarity": (lambda x, w: F.cosine_similarity(x, w, -1), [(2, 3), (3,)]),
    "pairwise_distance": (lambda x, w: F.pairwise_distance(x, w), [(2, 3), (3,)]),
    "normalize": (lambda x, w: F.normalize(x * w, dim=-1), [(2, 3), (3,)]),
    "pad": (lambda x, w: F.pad(x * w, (1, 1)), [(2, 3), (3,)]),
    "max_pool1d": (lambda x, w: F.max_pool1d(x * w, 2), [(2, 3, 4), (4,)]),
    "interpolate": (lambda x, w: F.interpolate(x * w, scale_factor=2), [(2, 3, 4), (4,)]),
    "cumsum": (lambda x, w: torch.cumsum(x * w, 0), [(2, 3), (3,)]),
    "sort": (lambda x, w: torch.sort(x * w, -1).values, [(2, 3), (3,)]),
    "norm": (lambda x, w: torch.linalg.vector_norm(x * w, 2, -1), [(2, 3), (3,)]),
}


def compare(function: Callable[..., Any], tensors: list[Tensor], mesh: Any, placement: Any) -> None:
    """The first tensor is cut, the others are whole."""
    plain = [t.clone().requires_grad_() for t in tensors]
    expected = function(*plain)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weight).sum().backward()
    mine = [
        distribute_tensor(t, mesh, [placement if i == 0 else Replicate()]).requires_grad_()
        for i, t in enumerate(tensors)
    ]
    found = function(*mine)
    torch.testing.assert_close(whole(found), expected.detach())
    (found * distribute_tensor(weight, mesh)).sum().backward()
    for one, reference in zip(mine, plain, strict=True):
        assert (one.grad is None) == (reference.grad is None)
        if reference.grad is not None:
            torch.testing.assert_close(whole(one.grad), reference.grad)


@pytest.mark.fast
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_where_a_rank_holds_nothing(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    on_mesh(lambda mesh: compare(function, tensors, mesh, Shard(0)), 3, timeout=30.0)


@pytest.mark.fast
def test_empty_parts_and_second_derivatives() -> None:
    """A gradient that is differentiated in turn comes from a graph, on a rank that holds nothing too."""
    torch.manual_seed(0)
    batch, bias = torch.randn(2, 4, 3, 5), torch.randn(3, 3)

    def penalty(q: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        (first,) = torch.autograd.grad(out.square().sum(), mask, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (q, mask))

    expected = penalty(batch.clone().requires_grad_(), bias.clone().requires_grad_())

    def body(mesh: Any) -> None:
        q = distribute_tensor(batch, mesh, [Shard(0)]).requires_grad_()
        mask = distribute_tensor(bias, mesh).requires_grad_()
        for found, reference in zip(penalty(q, mask), expected, strict=True):
            torch.testing.assert_close(whole(found), reference)

    on_mesh(body, 3, timeout=30.0)


@pytest.mark.fast
def test_what_needs_no_gradient_needs_none_where_a_rank_holds_nothing() -> None:
    """Constants stay constants: the rank that holds nothing must not wait for a backward that no other one runs."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(2, 3), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(3), mesh).requires_grad_()
        for made in (torch.zeros_like(x), torch.ones_like(x * w), (x * w).detach(), (x * w) > 0, x.argmax(1)):
            assert not made.requires_grad
            assert not made.to_local().requires_grad
        held = torch.where((x * w) > 0, torch.zeros_like(x), torch.ones_like(x))
        (held * w).sum().backward()
        assert x.grad is None
        torch.testing.assert_close(whole(w.grad), whole(held).sum(0))

    on_mesh(body, 3, timeout=30.0)


@pytest.mark.fast
def test_results_of_a_rank_that_holds_nothing_can_be_written() -> None:
    def body(mesh: Any) -> None:
        q = distribute_tensor(torch.randn(2, 4, 3, 5), mesh, [Shard(0)])
        mask = distribute_tensor(torch.zeros(3, 3), mesh).requires_grad_()
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        out.mul_(2.0)
        out.sum().backward()
        plain = torch.zeros(3, 3, requires_grad=True)
        everything = q.full_tensor()
        (F.scaled_dot_product_attention(*(everything,) * 3, attn_mask=plain) * 2.0).sum().backward()
        torch.testing.assert_close(whole(mask.grad), plain.grad)

    on_mesh(body, 3, timeout=30.0)


@pytest.mark.parametrize(
    "name", ["nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"]
)
@pytest.mark.parametrize("ranks", [3, 5])
def test_attention_without_dropout_is_that_of_plain_tensors(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of torch's samples; with dropout they are only compared among DTensors."""
    (op,) = [op for op in op_db if op.name == name]
    everything = coverage.samples_of

    def some(op: Any, limit: int) -> list[Any]:
        found = everything(op, 1000)
        return [without_dropout(sample) for sample in found[:: math.ceil(len(found) / limit)]]

    monkeypatch.setattr(coverage, "RANDOM", [])
    monkeypatch.setattr(coverage, "samples_of", some)
    report = coverage.cover(op, 6, 4, (ranks,))
    assert report.counts["wrong"] == 0, report.problems
    assert report.counts["rule"] + report.counts["fallback"] >= 4


def without_dropout(sample: Any) -> Any:
    args = tuple(0.0 if type(value) is float else value for value in sample.args)
    named = {name: 0.0 if name == "dropout_p" else value for name, value in sample.kwargs.items()}
    return SampleInput(sample.input, args=args, kwargs=named)
