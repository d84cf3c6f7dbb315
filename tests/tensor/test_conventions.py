"""Ways of calling a function that mean the same: numpy's names, keywords in any order, dims one by one, in place.

Each was once wrong without a word, so each is tried under many layouts against plain tensors.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import Tensor, nn

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


X, Y, A, B, ONES = (
    normal(4, 6),
    normal(4, 6, seed=1),
    normal(4, 4, seed=2),
    normal(4, 4, seed=3),
    normal(1, 4, 1),
)
INDEX = torch.tensor([1, 2])
Lift = Callable[[Tensor], Any]

CALLS: dict[str, Callable[[Lift], Any]] = {
    "sum(axis, keepdims)": lambda d: d(X).sum(axis=0, keepdims=True),
    "mean(axis, keepdims)": lambda d: d(X).mean(axis=0, keepdims=True),
    "amax(axis, keepdims)": lambda d: d(X).amax(axis=0, keepdims=True),
    "max(axis, keepdims)": lambda d: d(X).max(axis=0, keepdims=True),
    "argmax(axis, keepdims)": lambda d: d(X).argmax(axis=0, keepdims=True),
    "all(axis, keepdims)": lambda d: (d(X) > 0).all(axis=0, keepdims=True),
    "logsumexp(axis, keepdims)": lambda d: d(X).logsumexp(axis=0, keepdims=True),
    "std(axis)": lambda d: d(X).std(axis=0),
    "vector_norm(keepdims)": lambda d: torch.linalg.vector_norm(d(X), axis=0, keepdims=True),
    "sort(axis)": lambda d: d(X).sort(axis=0),
    "argsort(axis)": lambda d: d(X).argsort(axis=0),
    "topk(axis)": lambda d: d(X).topk(2, axis=0),
    "stack(axis)": lambda d: torch.stack([d(X), d(Y)], axis=1),
    "cat(axis)": lambda d: torch.cat([d(X), d(Y)], axis=1),
    "squeeze(axis)": lambda d: d(ONES).squeeze(axis=0),
    "unsqueeze(axis)": lambda d: d(ONES).unsqueeze(axis=0),
    "select(axis)": lambda d: torch.select(d(X), axis=0, index=1),
    "unbind(axis)": lambda d: torch.unbind(d(X), axis=1),
    "chunk(axis)": lambda d: torch.chunk(d(X), 2, axis=1),
    "index_select(axis)": lambda d: torch.index_select(d(X), axis=0, index=d(INDEX)),
    "gather(axis)": lambda d: torch.gather(d(X), axis=0, index=d(torch.zeros(4, 6, dtype=torch.int64))),
    "matmul(other, input)": lambda d: torch.matmul(other=d(A), input=d(B)),
    "mm(mat2, input)": lambda d: torch.mm(mat2=d(A), input=d(B)),
    "div(other, input)": lambda d: torch.div(other=d(A), input=d(B)),
    "addmm(mat2, mat1)": lambda d: torch.addmm(d(A[0]), mat2=d(A), mat1=d(B)),
    "linear(weight, input)": lambda d: F.linear(weight=d(A), input=d(B)),
    "linear(bias, weight)": lambda d: F.linear(d(B), bias=d(A[0]), weight=d(A)),
    "where(other, input, condition)": lambda d: torch.where(other=d(X), input=d(Y), condition=d(X > 0)),
    "sum(input)": lambda d: torch.sum(input=d(X), dim=1),
    "argmax(input)": lambda d: torch.argmax(input=d(X), dim=1),
    "permute(input)": lambda d: torch.permute(input=d(X), dims=(1, 0)),
    "max(input)": lambda d: torch.max(input=d(X)),
    "x.where(condition, y)": lambda d: d(X).where(d(X > 0), d(Y)),
    "where(condition)": lambda d: torch.where(d(X) > 0),
    "flip(0, 1)": lambda d: d(X).flip(0, 1),
    "flip((0, 1))": lambda d: d(X).flip((0, 1)),
    "roll of one dim": lambda d: d(X).roll(2, 0),
    "roll of two": lambda d: d(X).roll((1, 2), (0, 1)),
    "roll of all": lambda d: d(X).roll(3),
    "x.to(y) of another shape": lambda d: d(X[0]).to(d(X.double())),
    "x.type_as(y) of another shape": lambda d: d(X).type_as(d(X[:3, 0].double())),
}


def laid_out(tensor: Tensor, mesh: Any, rng: random.Random) -> DTensor:
    """``tensor`` under a layout drawn by ``rng``; partial ones as unequal contributions."""
    kinds = [Replicate(), *map(Shard, range(tensor.dim())), *[Partial()] * tensor.is_floating_point()]
    placements = [rng.choice(kinds) for _ in range(mesh.ndim)]
    made = distribute_tensor(
        tensor, mesh, [Replicate() if p.is_partial() else p for p in placements], src_data_rank=None
    )
    local = made.redistribute(placements=placements).to_local().clone()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            local += {0: 0.5, 1: -0.5}.get(mesh.get_local_rank(axis), 0.0)
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert tuple(found.to_local().shape) == found._spec.local_shape
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_every_way_of_calling_is_the_same_call(name: str) -> None:
    call = CALLS[name]
    expected = call(lambda tensor: tensor)

    def body(mesh: Any) -> None:
        for seed in range(6):
            lift = functools.partial(laid_out, mesh=mesh, rng=random.Random(f"{name}{seed}"))
            assert_equal(call(lift), expected)

    on_mesh(body, 2, 2)


LAYOUTS = [Shard(0), Shard(1), Replicate(), Partial()]


def made(tensor: Tensor, mesh: Any, placement: Any) -> DTensor:
    """A copy of ``tensor`` under one placement, which may be partial."""
    whole = distribute_tensor(tensor.clone(), mesh, src_data_rank=None)
    return whole.redistribute(placements=[placement]).detach().clone()


IN_PLACE: dict[str, Callable[[Any, Lift], Any]] = {
    "t_": lambda x, d: x.t_(),
    "transpose_": lambda x, d: x.transpose_(0, 1),
    "unsqueeze_": lambda x, d: x.unsqueeze_(1),
    "squeeze_": lambda x, d: x.unsqueeze_(1).squeeze_(),
    "squeeze_ of one": lambda x, d: x.unsqueeze_(0).unsqueeze_(-1).squeeze_(0),
    "squeeze_ of no dim": lambda x, d: x.mul_(x.sum().squeeze_(0)),
    "squeeze_ of a longer dim": lambda x, d: x.squeeze_(0),
    "apply_": lambda x, d: x.apply_(lambda value: value + 1),
    "map_": lambda x, d: x.map_(d(Y), lambda a, b: a + 2 * b),
    "relu": lambda x, d: F.relu(x, inplace=True),
    "relu by position": lambda x, d: F.relu(x, True),
    "leaky_relu": lambda x, d: F.leaky_relu(x, 0.3, True),
    "hardtanh": lambda x, d: F.hardtanh(x, -0.5, 0.5, inplace=True),
    "elu": lambda x, d: F.elu(x, alpha=0.7, inplace=True),
    "silu": lambda x, d: F.silu(x, inplace=True),
    "module": lambda x, d: nn.ReLU6(inplace=True)(x),
    "copy_": lambda x, d: x.copy_(d(torch.arange(6.0))),
    "masked_fill_": lambda x, d: x.masked_fill_(d(Y > 0), 3.0),
    "index_put_": lambda x, d: x.index_put_((d(INDEX), d(INDEX)), d(torch.ones(2)), accumulate=True),
    "fill_diagonal_": lambda x, d: x.fill_diagonal_(3.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("placement", LAYOUTS, ids=str)
def test_in_place_forms_change_the_tensor_itself(name: str, placement: Any) -> None:
    act = IN_PLACE[name]
    expected = X.clone()
    act(expected, lambda tensor: tensor)

    def body(mesh: Any) -> None:
        x = made(X, mesh, placement)
        assert act(x, lambda tensor: distribute_tensor(tensor, mesh, src_data_rank=None)) is x
        assert x.shape == expected.shape
        assert_equal(x, expected)
        assert_equal(x * 2, expected * 2)

    on_mesh(body, 2)


def test_activations_out_of_place_leave_their_argument_alone() -> None:
    def body(mesh: Any) -> None:
        x = made(X, mesh, Shard(0))
        for func in (lambda t: F.relu(t, inplace=False), nn.ReLU(), lambda t: F.leaky_relu(t, 0.2), F.selu):
            assert_equal(func(x), func(X))
            assert_equal(x, X)

    on_mesh(body, 2)


def test_an_argument_that_does_not_fit_in_place_is_refused_as_torch_does() -> None:
    """On the parts it would fit: four elements by two ranks are two, and two are one, which broadcasts."""

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        y = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        with pytest.raises(RuntimeError):
            x.add_(y)
        one = distribute_tensor(torch.zeros(1), mesh)
        with pytest.raises(RuntimeError, match=r"broadcast to \(2,\)"):
            one.mul_(y)
        assert x.full_tensor().tolist() == [0.0] * 4

    on_mesh(body, 2)


def test_in_place_changes_of_memory_are_refused() -> None:
    def body(mesh: Any) -> None:
        for placement in LAYOUTS:
            with pytest.raises(NotImplementedError, match="as_strided"):
                made(X, mesh, placement).as_strided_((2, 2), (1, 2))

    on_mesh(body, 2)


def test_names_of_types() -> None:
    def body(mesh: Any) -> None:
        x = made(X, mesh, Shard(0))
        assert x.type() == "torch.FloatTensor"
        assert_equal(x.type(torch.float64), X.double())
        assert x.cpu().placements == (Shard(0),)
        assert made(X, mesh, Partial()).cpu().placements == (Partial(),)

    on_mesh(body, 2)
