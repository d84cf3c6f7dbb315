"""Values of random functions under all kinds of layouts, in narrow and complex dtypes; arguments they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import nn

from phalanx.tensor import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    full,
    implicit_replication,
    manual_seed,
    ones,
    rand,
    randn,
    randperm,
)

Act = Callable[[Any, list[Any]], Any]


def filled(mesh: Any, placements: list[Any], *shape: int, value: Any = 1.0, dtype: Any = torch.float32) -> Any:
    return full(shape or (5, 6), value, dtype=dtype, device_mesh=mesh, placements=placements)


def of_rows(placements: list[Any]) -> list[Any]:
    """The same for a tensor of one dim."""
    return [p if isinstance(p, Shard) and not p.dim else Replicate() for p in placements]


ACTS: dict[str, Act] = {
    "rand": lambda m, p: rand(5, 6, device_mesh=m, placements=p),
    "rand bfloat16": lambda m, p: rand(5, 6, dtype=torch.bfloat16, device_mesh=m, placements=p),
    "rand complex": lambda m, p: rand(5, 6, dtype=torch.complex64, device_mesh=m, placements=p),
    "randn complex": lambda m, p: randn(5, 6, dtype=torch.complex128, device_mesh=m, placements=p),
    "randn empty": lambda m, p: randn(0, 6, device_mesh=m, placements=p),
    "randperm": lambda m, p: randperm(13, device_mesh=m, placements=of_rows(p)),
    "randperm of none": lambda m, p: randperm(0, device_mesh=m, placements=of_rows(p)),
    "rand_like": lambda m, p: torch.rand_like(filled(m, p, dtype=torch.complex64)),
    "randn_like": lambda m, p: torch.randn_like(filled(m, p), dtype=torch.float64),
    "randint_like": lambda m, p: torch.randint_like(filled(m, p), low=3, high=9),
    "log_normal_": lambda m, p: filled(m, p).log_normal_(),
    "cauchy_": lambda m, p: filled(m, p).cauchy_(),
    "exponential_": lambda m, p: filled(m, p, dtype=torch.float16).exponential_(2.0),
    "geometric_": lambda m, p: filled(m, p).geometric_(0.3),
    "random_": lambda m, p: filled(m, p, dtype=torch.int64, value=1).random_(-(2**63), None),
    "bernoulli": lambda m, p: torch.bernoulli(filled(m, p, value=0.4)),
    "bernoulli_ of probabilities": lambda m, p: filled(m, p).bernoulli_(
        filled(m, [Replicate()] * m.ndim, 6, value=0.3)
    ),
    "dropout": lambda m, p: F.dropout(filled(m, p), 0.4),
    "dropout2d": lambda m, p: F.dropout2d(filled(m, p, 3, 4, 5, 2), 0.4),
    "alpha_dropout": lambda m, p: F.alpha_dropout(filled(m, p), 0.4, training=True),
    "native_dropout": lambda m, p: torch.native_dropout(filled(m, p), 0.4, True)[1],
    "rrelu": lambda m, p: F.rrelu(filled(m, p, value=-1.0), training=True),
    "normal": lambda m, p: torch.normal(filled(m, p), filled(m, p)),
    "normal complex": lambda m, p: torch.normal(filled(m, p, dtype=torch.complex64), filled(m, p, value=2.0)),
    "multinomial": lambda m, p: torch.multinomial(filled(m, p), 30, replacement=True),
    "gumbel_softmax": lambda m, p: F.gumbel_softmax(filled(m, p)),
    "uniform_ of a view": lambda m, p: (lambda t: (t[1:4].uniform_(), t)[1])(filled(m, p)),
    "normal_ of a transposed view": lambda m, p: (lambda t: (t.t().normal_(), t)[1])(filled(m, p)),
    "sparse_": lambda m, p: nn.init.sparse_(nn.Parameter(filled(m, p)), 0.3),
}

LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [Shard(0)]),
    ((2,), [Partial()]),
    ((7,), [Shard(0)]),  # two ranks hold nothing
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(1)]),
    ((2, 2), [Partial(), Shard(0)]),
    ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.mark.parametrize("name", list(ACTS))
def test_values_are_those_of_one_rank(name: str) -> None:
    def body(mesh: Any, placements: list[Any]) -> Any:
        manual_seed(11, mesh)
        rand(3, device_mesh=mesh)
        made = ACTS[name](mesh, placements).full_tensor().detach()
        return made, rand(3, device_mesh=mesh).full_tensor()

    ((expected, following),) = on_mesh(lambda mesh: body(mesh, [Replicate()]), 1)
    assert expected.numel() == 0 or len(set(expected.flatten().tolist())) > 1
    for shape, placements in LAYOUTS:
        for made, after in on_mesh(partial(body, placements=placements), *shape):
            torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(after, following)


def test_narrow_dtypes_decide_as_wide_ones() -> None:
    def body(mesh: Any) -> None:
        count = 40_000
        results: dict[torch.dtype, list[Any]] = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            manual_seed(0, mesh)
            x = ones(count, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            weights = ones(1000, dtype=dtype, device_mesh=mesh)
            results[dtype] = [
                F.dropout(x, 0.001).full_tensor() == 0,
                x.clone().bernoulli_(0.001).full_tensor(),
                F.dropout1d(x.view(200, 200), 0.01).full_tensor() == 0,
                torch.multinomial(weights, 20_000, replacement=True).full_tensor(),
                torch.multinomial(weights, 900).full_tensor(),
            ]
            manual_seed(1, mesh)
            assert not F.gumbel_softmax(x.view(200, 200)).full_tensor().isnan().any()
            assert (x.clone().exponential_() > 0).all().item()
            assert (x.clone().exponential_(1e12 if dtype is not torch.float16 else 1e3) > 0).all().item()
            assert (rand(count, dtype=dtype, device_mesh=mesh) < 1).all().item()
            assert x.clone().geometric_(0.001).double().mean().item() == pytest.approx(1000, rel=0.05)
        expected = results[torch.float64]
        assert expected[0].double().mean().item() == pytest.approx(0.001, rel=0.5)
        assert expected[3].unique().numel() == 1000
        for dtype, found in results.items():
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.double(), b.double()), dtype

    on_mesh(body, 2)


def test_bernoulli_of_small_probabilities_in_narrow_dtypes() -> None:
    def body(mesh: Any) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            chances = full((100_000,), 0.001, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            assert torch.bernoulli(chances).double().mean().item() == pytest.approx(0.001, rel=0.3)

    on_mesh(body, 2)


def test_both_parts_of_complex_numbers_are_drawn() -> None:
    def body(mesh: Any) -> None:
        options: Any = {"device_mesh": mesh, "placements": [Shard(0)]}
        zero = full((100_000,), 0j, dtype=torch.complex64, **options)
        third = 1 / 12
        for made, variance, mean in (
            (randn(100_000, dtype=torch.complex64, **options), 0.5, 0),
            (torch.randn_like(zero), 0.5, 0),
            (zero.clone().normal_(1.0, 2.0), 2.0, 1),
            (torch.normal(zero, 1.0), 0.5, 0),
            (rand(100_000, dtype=torch.complex64, **options), third, 0.5 + 0.5j),
            (torch.rand_like(zero), third, 0.5 + 0.5j),
            (zero.clone().uniform_(), third, 0.5 + 0.5j),
        ):
            assert made.dtype is torch.complex64
            whole = torch.view_as_real(made.full_tensor()).double()
            torch.testing.assert_close(whole.var(0), torch.full((2,), variance, dtype=torch.float64), rtol=0.02, atol=0)
            torch.testing.assert_close(
                whole.mean(0),
                torch.view_as_real(torch.tensor(mean, dtype=torch.complex128)),
                rtol=0,
                atol=0.02,
            )
            assert abs(torch.corrcoef(whole.t())[0, 1].item()) < 0.02

    on_mesh(body, 2)


def test_sparse_zeroes_the_same_number_in_each_column() -> None:
    def body(mesh: Any) -> None:
        made = nn.init.sparse_(ones(10, 7, device_mesh=mesh, placements=[Shard(0)]), 0.25, std=2.0).full_tensor()
        assert (made == 0).sum(0).tolist() == [3] * 7
        assert len({tuple(column) for column in (made == 0).t().tolist()}) > 1
        with pytest.raises(ValueError, match="2 dims"):
            nn.init.sparse_(ones(10, device_mesh=mesh), 0.25)
        with pytest.raises(NotImplementedError, match="generator="):
            nn.init.sparse_(ones(10, 7, device_mesh=mesh), 0.25, generator=torch.Generator())

    on_mesh(body, 2)
    plain = nn.init.sparse_(torch.empty(10, 7), 0.25)
    assert (plain == 0).sum(0).tolist() == [3] * 7


def test_native_dropout_gives_result_and_mask() -> None:
    def body(mesh: Any) -> None:
        x = ones(4, 3, device_mesh=mesh, placements=[Shard(0)])
        for p, train in ((0.5, False), (0.0, True)):
            result, mask = torch.native_dropout(x, p, train)
            assert result is not x
            assert torch.equal(result.full_tensor(), torch.ones(4, 3))
            assert mask.dtype is torch.bool
            assert mask.full_tensor().all()
        result, mask = torch.native_dropout(x, 0.5, None)
        assert torch.equal(result.full_tensor(), mask.full_tensor() * 2.0)
        assert F.dropout(x, 0.5, training=False) is x

    on_mesh(body, 2)


def test_integers_stay_between_their_bounds_where_the_dtype_rounds() -> None:
    def body(mesh: Any) -> None:
        options: Any = {"device_mesh": mesh, "placements": [Shard(0)]}
        for dtype, low, high in (
            (torch.float32, 2**24 + 1, 2**24 + 8),
            (torch.bfloat16, 257, 520),
            (torch.float16, 2049, 4100),
            (torch.uint8, 250, 256),
            (torch.int64, 2**63 - 3, 2**63),
            (torch.bool, 0, 2),
        ):
            made = ones(2000, dtype=dtype, **options).random_(low, high).full_tensor().tolist()
            assert low <= min(made) < max(made) < high, dtype
        assert ones(2000, dtype=torch.int8, **options).random_(3, None).min().item() >= 3
        assert ones(2000, dtype=torch.bfloat16, **options).random_().max().item() <= 256
        assert ones(2000, dtype=torch.int8, **options).geometric_(0.001).min().item() >= 1
        drawn = torch.randint_like(ones(4, **options), 9, requires_grad=True)
        assert drawn.requires_grad

    on_mesh(body, 2)


def test_results_have_zero_gradients_as_on_one_device() -> None:
    def body(mesh: Any) -> None:
        x = full((4,), 0.5, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        for made in (torch.bernoulli(x), torch.normal(x, 1.0), torch.normal(0.0, x)):
            (gradient,) = torch.autograd.grad(made.sum(), x)
            assert gradient.full_tensor().tolist() == [0.0] * 4

    on_mesh(body, 2)


NAN, INF = math.nan, math.inf
REFUSED: dict[str, Callable[[Any], Any]] = {
    "bernoulli_ above 1": lambda x: x.bernoulli_(1.5),
    "bernoulli below 0": lambda x: torch.bernoulli(x, -1.0),
    "bernoulli of 3": lambda x: torch.bernoulli(x * 3),
    "bernoulli of nan": lambda x: torch.bernoulli(x * NAN),
    "bernoulli_ by 3": lambda x: torch.zeros_like(x).bernoulli_(x * 3),
    "bernoulli of integers": lambda x: torch.bernoulli(x.long()),
    "bernoulli_ by a longer tensor": lambda x: x.bernoulli_(torch.stack([x, x]) * 0.5),
    "random_ of nothing": lambda x: x.random_(5, 5),
    "random_ turned round": lambda x: x.random_(8, 3),
    "random_ to 0": lambda x: x.random_(0),
    "random_ past uint8": lambda x: x.to(torch.uint8).random_(0, 300),
    "random_ to 5.5": lambda x: x.random_(5.5),
    "random_ to None": lambda x: x.random_(None),
    "random_ of complex": lambda x: x.to(torch.complex64).random_(),
    "randint_like of nothing": lambda x: torch.randint_like(x, 5, 5),
    "randint_like past half": lambda x: torch.randint_like(x.half(), 10**6),
    "randint_like integers with gradient": lambda x: torch.randint_like(x.long(), 5, requires_grad=True),
    "uniform_ of integers": lambda x: x.long().uniform_(),
    "uniform_ to infinity": lambda x: x.uniform_(0, INF),
    "uniform_ from nan": lambda x: x.uniform_(NAN, 1),
    "uniform_ past half": lambda x: x.half().uniform_(0, 1e6),
    "normal_ of integers": lambda x: x.long().normal_(),
    "normal_ with std nan": lambda x: x.normal_(0, NAN),
    "exponential_ of integers": lambda x: x.long().exponential_(),
    "exponential_ of complex": lambda x: x.to(torch.complex64).exponential_(),
    "cauchy_ of integers": lambda x: x.long().cauchy_(),
    "log_normal_ of integers": lambda x: x.long().log_normal_(),
    "geometric_ of 1": lambda x: x.geometric_(1.0),
    "geometric_ of bool": lambda x: x.bool().geometric_(0.5),
    "rand_like of integers": lambda x: torch.rand_like(x.long()),
    "randn_like as integers": lambda x: torch.randn_like(x, dtype=torch.int64),
    "rand_like sparse": lambda x: torch.rand_like(x, layout=torch.sparse_coo),
    "normal with std below 0": lambda x: torch.normal(x, -x),
    "normal with complex std": lambda x: torch.normal(1.0, x.to(torch.complex64)),
    "normal of integers": lambda x: torch.normal(x.long(), 1.0),
    "dropout of integers": lambda x: F.dropout(x.long(), 0.5),
    "dropout of bool": lambda x: torch.dropout(x.bool(), 0.5, True),
    "dropout above 1, not training": lambda x: torch.dropout(x, 1.5, False),
    "alpha_dropout above 1": lambda x: torch.alpha_dropout(x, 1.5, True),
    "native_dropout above 1": lambda x: torch.native_dropout(x, 1.5, True),
    "feature_dropout of one dim": lambda x: torch.feature_dropout(x[0], 0.5, True),
    "rrelu of integers": lambda x: torch.rrelu(x.long(), training=True),
    "rrelu to infinity": lambda x: torch.rrelu(x, 0.1, INF, True),
    "multinomial of none": lambda x: torch.multinomial(x, 0),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_torch_refuses_is_refused_on_every_rank(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        REFUSED[name](torch.ones(4, 3))

    def body(mesh: Any) -> str:
        x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            REFUSED[name](x)
        assert rand(2, device_mesh=mesh).full_tensor().shape == (2,)  # the ranks still agree
        return str(caught.value)

    told = on_mesh(body, 2)
    assert told[0] == told[1]


def test_one_bad_probability_on_one_rank_is_refused_on_all() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.tensor([0.5, 0.5, 0.5, 2.0]), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="probabilities"):
            torch.bernoulli(x)
        with pytest.raises(RuntimeError, match="std >= 0"):
            torch.normal(0.0, 1 - x)
        assert x.full_tensor().shape == (4,)

    on_mesh(body, 2)


def test_arguments_that_mean_nothing_on_a_mesh_are_refused() -> None:
    def body(mesh: Any) -> None:
        x = ones(4, 3, device_mesh=mesh, placements=[Shard(0)])
        with pytest.raises(NotImplementedError, match="generator="):
            torch.randint_like(x, 9, generator=torch.Generator())
        with pytest.raises(ValueError, match="device"):
            torch.rand_like(x, device="meta")
        assert torch.rand_like(input=x, device="cpu").placements == x.placements
        with pytest.raises(RuntimeError, match="plain tensor of shape"):
            x.bernoulli_(torch.full((4, 3), 0.5))
        with implicit_replication():
            assert x.bernoulli_(torch.ones(4, 3)).full_tensor().sum() == 12
        for act, told in (
            (lambda: rand(3, dtype=torch.int64, device_mesh=mesh), "rand "),
            (lambda: randn(3, dtype=torch.bool, device_mesh=mesh), "randn "),
            (lambda: randperm(300, dtype=torch.uint8, device_mesh=mesh), "counts to 255"),
            (lambda: randperm(2050, dtype=torch.float16, device_mesh=mesh), "counts to 2048"),
            (lambda: randperm(-1, device_mesh=mesh), "n >= 0"),
            (lambda: randperm(3, dtype=torch.bool, device_mesh=mesh), "bool"),
        ):
            with pytest.raises(RuntimeError, match=told):
                act()
        assert sorted(randperm(256, dtype=torch.uint8, device_mesh=mesh).tolist()) == list(range(256))

    on_mesh(body, 2)
