"""Random values belong to elements: the same under every layout and world size, restored with torch's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import (
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_rng_state,
    manual_seed,
    rand,
    randn,
    randperm,
    set_rng_state,
    zeros,
)
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.random._philox import element_bits, normal, uniform, words


def draws(size: int, placements: list[Any], act: Callable[[Any, list[Any]], Any]) -> torch.Tensor:
    def rank_main(group: Any) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (size,))
        manual_seed(11, mesh)
        return act(mesh, placements).full_tensor().detach()

    results = comm.simulate(size).run(rank_main)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    return results[0]


ACTS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "rand": lambda mesh, p: rand(6, 5, device_mesh=mesh, placements=p),
    "randn": lambda mesh, p: randn(6, 5, device_mesh=mesh, placements=p),
    "uniform_": lambda mesh, p: zeros(6, 5, device_mesh=mesh, placements=p).uniform_(-2, 3),
    "normal_": lambda mesh, p: zeros(6, 5, device_mesh=mesh, placements=p).normal_(1, 2),
    "bernoulli_": lambda mesh, p: zeros(6, 5, device_mesh=mesh, placements=p).bernoulli_(0.3),
    "dropout": lambda mesh, p: F.dropout(zeros(6, 5, device_mesh=mesh, placements=p) + 1, 0.4),
    "rand_like": lambda mesh, p: torch.rand_like(zeros(6, 5, device_mesh=mesh, placements=p)),
    "trunc_normal_": lambda mesh, p: nn.init.trunc_normal_(zeros(6, 5, device_mesh=mesh, placements=p)),
    "xavier_uniform_": lambda mesh, p: nn.init.xavier_uniform_(zeros(6, 5, device_mesh=mesh, placements=p)),
    "kaiming_normal_": lambda mesh, p: nn.init.kaiming_normal_(zeros(6, 5, device_mesh=mesh, placements=p)),
    "orthogonal_": lambda mesh, p: nn.init.orthogonal_(zeros(6, 5, device_mesh=mesh, placements=p)),
    "multinomial": lambda mesh, p: torch.multinomial(rand(6, 5, device_mesh=mesh, placements=p), 3),
    "gumbel_softmax": lambda mesh, p: F.gumbel_softmax(zeros(6, 5, device_mesh=mesh, placements=p)),
    "exponential_": lambda mesh, p: zeros(6, 5, device_mesh=mesh, placements=p).exponential_(),
    "random_": lambda mesh, p: zeros(6, 5, device_mesh=mesh, placements=p).random_(10),
}


@pytest.mark.parametrize("name", list(ACTS))
def test_values_do_not_depend_on_layout_or_world_size(name: str) -> None:
    alone = draws(1, [Replicate()], ACTS[name])
    for size, placement in ((2, Shard(0)), (2, Shard(1)), (3, Shard(1)), (2, Replicate())):
        torch.testing.assert_close(draws(size, [placement], ACTS[name]), alone, rtol=1e-6, atol=1e-6)
    assert alone.unique().numel() > 1


def test_the_fast_path_makes_the_words_of_the_naive_one() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for shape in ((7, 200), (200, 7), (5, 6, 70)):
            whole = words((3, 4), 0, torch.Size(shape).numel()).reshape(shape)
            for placements in (
                (Shard(0), Shard(0)),
                (Shard(1), Shard(0)),
                (Replicate(), Shard(1)),
                (StridedShard(0, split_factor=2), Shard(0)),
            ):
                spec = Spec.of(mesh, placements, shape, torch.float32)
                part = whole
                for dim in range(len(shape)):
                    part = part.take(spec.local_indices(dim), axis=dim)
                assert (element_bits(spec, (3, 4)) == part).all()

    comm.simulate(4).run(rank_main)


def test_words_are_those_of_numpys_generator_wherever_they_begin() -> None:
    plain = np.random.Philox(key=np.array([3, 4], dtype=np.uint64)).random_raw(50)
    for start in range(10):
        assert (words((3, 4), start, 40) == plain[start : start + 40]).all()


def test_distributions_have_the_right_moments() -> None:
    bits = words((1, 2), 0, 200_000)
    assert uniform(bits).mean() == pytest.approx(0.5, abs=0.005)
    assert uniform(bits).min() >= 0
    assert uniform(bits).max() < 1
    assert normal(bits).mean() == pytest.approx(0, abs=0.01)
    assert normal(bits).std() == pytest.approx(1, abs=0.01)


def test_seeds_and_states() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(5)
        first = rand(8, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        second = rand(8, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        assert not torch.equal(first, second)
        torch.manual_seed(5)
        assert torch.equal(rand(8, device_mesh=mesh).full_tensor(), first)
        state = get_rng_state(mesh)
        later = rand(8, device_mesh=mesh).full_tensor()
        assert torch.equal(later, second)
        set_rng_state(state, mesh)
        assert torch.equal(rand(8, device_mesh=mesh).full_tensor(), later)
        saved = torch.get_rng_state()
        one = rand(4, device_mesh=mesh).full_tensor()
        torch.set_rng_state(saved)
        assert torch.equal(rand(4, device_mesh=mesh).full_tensor(), one)
        order = randperm(10, device_mesh=mesh).full_tensor()
        assert sorted(order.tolist()) == list(range(10))
        with pytest.raises(NotImplementedError, match="generator="):
            distribute_tensor(torch.zeros(4), mesh).uniform_(generator=torch.Generator())

    comm.simulate(2).run(rank_main)


def test_replicas_agree_though_torch_was_seeded_differently() -> None:
    def rank_main(group: Any) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(group.rank)
        return F.dropout(zeros(16, device_mesh=mesh) + 1).to_local().tolist()

    a, b = comm.simulate(2).run(rank_main)
    assert a == b


def test_out_arguments_are_written() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        chances = distribute_tensor(torch.tensor([0.0, 1.0, 1.0, 0.0]), mesh, [Shard(0)])
        coins = distribute_tensor(torch.full((4,), 7.0), mesh, [Shard(0)])
        assert torch.bernoulli(chances, out=coins) is coins
        assert coins.full_tensor().tolist() == [0.0, 1.0, 1.0, 0.0]
        drawn = distribute_tensor(torch.full((2,), 7), mesh)
        assert torch.multinomial(chances, 2, out=drawn) is drawn
        assert sorted(drawn.full_tensor().tolist()) == [1, 2]

    comm.simulate(2).run(rank_main)


def test_functions_that_would_diverge_are_refused() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.rand(4, 4), mesh, [Shard(0)])
        for act in (lambda: torch.poisson(x), lambda: torch.svd_lowrank(x)):
            with pytest.raises(NotImplementedError, match="differ from rank to rank"):
                act()
        lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        for name, p in list(lstm.named_parameters()):
            lstm.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh)))
        with pytest.raises(NotImplementedError, match="dropout"):
            lstm(x.unsqueeze(0))

    comm.simulate(2).run(rank_main)
