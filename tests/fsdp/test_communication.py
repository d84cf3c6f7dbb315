"""What is sent: textbook numbers of collectives for each scheme, and the order of units, compared on all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp.models import batch, build
from fsdp.ranks import on_ranks, shard
from phalanx.errors import CollectiveMismatch, RankFailed
from phalanx.fsdp import FSDPModule, fully_shard
from phalanx.tensor.debug import CommDebugMode

GATHER, REDUCE, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


def counts(mesh, step, **options):
    model = shard(build("transformer"), mesh, **options)
    step(model)  # the first step is like all others
    with CommDebugMode() as seen:
        step(model)
    return seen.get_comm_counts()


def one_step(model):
    model(batch(0)).pow(2).mean().backward()


def test_numbers_of_collectives():
    """Four blocks and the root: five units."""
    cases = [
        ((2,), one_step, {}, {GATHER: 4 * 2 + 1, REDUCE: 5}),
        ((2,), one_step, {"reshard_after_forward": True}, {GATHER: 5 * 2, REDUCE: 5}),
        ((2,), one_step, {"reshard_after_forward": False}, {GATHER: 5, REDUCE: 5}),
        ((2, 2), one_step, {}, {GATHER: 9, REDUCE: 5, SUM: 5}),
    ]
    for shape, step, options, expected in cases:
        found = on_ranks(lambda mesh, s=step, o=options: counts(mesh, s, **o), *shape)
        assert found == [expected] * math.prod(shape)


def test_numbers_without_synchronization_and_without_grad():
    def unsynchronized(model):
        model.set_requires_gradient_sync(False)
        one_step(model)

    def evaluated(model):
        with torch.no_grad():
            model(batch(0))

    def only_shards(model):
        model.set_requires_all_reduce(False)
        one_step(model)

    assert on_ranks(lambda mesh: counts(mesh, unsynchronized), 2) == [{GATHER: 9}] * 2
    assert on_ranks(lambda mesh: counts(mesh, evaluated), 2) == [{GATHER: 5}] * 2
    assert on_ranks(lambda mesh: counts(mesh, only_shards), 2, 2) == [{GATHER: 9, REDUCE: 5}] * 4


def test_autograd_grad_reduces_nothing():
    def step(model):
        x = torch.randn(2, 6, 12, requires_grad=True)
        block = model.layers[0]
        torch.autograd.grad(block(x).sum(), x)
        assert all(p.grad is None for p in model.parameters())

    def body(mesh):
        model = shard(build("transformer"), mesh)
        model(batch(0))
        with CommDebugMode() as seen:
            step(model)
        return seen.get_comm_counts()

    assert on_ranks(body, 2) == [{GATHER: 2}] * 2


def test_bytes_of_a_step():
    """Gathered and reduced are the parameters, the header and padding of each unit, nothing else."""

    def body(mesh):
        model = shard(build("transformer"), mesh, reshard_after_forward=False)
        elements = sum(p.numel() for p in model.parameters())
        with CommDebugMode() as seen:
            one_step(model)
        for name in (GATHER, REDUCE):
            assert elements * 4 <= seen.get_comm_bytes()[name] <= (elements + 5 * 2 * 2 * 64) * 4

    on_ranks(body, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_units_of_one_size_in_another_order_are_an_error(size):
    def gathers(mesh):
        model = shard(build("transformer"), mesh)
        model(batch(0))
        (model.layers[1] if mesh.get_rank() else model.layers[2])(torch.randn(2, 6, 12))

    with pytest.raises(RankFailed) as caught:
        on_ranks(gathers, size)
    error = caught.value.__cause__
    assert isinstance(error, CollectiveMismatch)
    assert "gathers unit 'layers.2' where rank 1 gathers unit 'layers.1'" in str(error) or (
        "gathers unit 'layers.1' where rank 0 gathers unit 'layers.2'" in str(error)
    )

    def reduces(mesh):
        model = shard(build("transformer"), mesh, reshard_after_forward=False)
        model(batch(0))
        x = torch.randn(2, 6, 12, requires_grad=True)
        one, other = model.layers[1](x), model.layers[2](x)
        (one if mesh.get_rank() else other).sum().backward()

    with pytest.raises(RankFailed) as caught:
        on_ranks(reduces, size)
    error = caught.value.__cause__
    assert isinstance(error, CollectiveMismatch)
    assert "reduces unit 'layers.1' where rank 0 reduces unit 'layers.2'" in str(error) or (
        "reduces unit 'layers.2' where rank 1 reduces unit 'layers.1'" in str(error)
    )


def test_parameters_that_only_some_ranks_use():
    """A missing gradient counts as zero where another rank has one; where none has, there is none."""

    def body(mesh):
        layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))

        class Chosen(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                return self.layers[mesh.get_rank()](x)

        model = fully_shard(Chosen(), mesh=mesh)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return [None if p.grad is None else p.grad.full_tensor().tolist() for p in model.parameters()]

    half = [[0.5, 0.5], [0.5, 0.5]]
    assert on_ranks(body, 2) == [[half, half, None]] * 2


def test_collectives_are_shown_by_module():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        one_step(model)
        with CommDebugMode() as seen:
            one_step(model)
        return seen.get_module_counts()

    found = on_ranks(body, 2)[0]
    for name in ("FSDPMLP.first", "FSDPMLP.second"):
        assert found[name] == {"forward": {GATHER: 1}, "backward": {GATHER: 1, REDUCE: 1}}, name
    assert found["FSDPMLP"] == {"forward": {GATHER: 3}, "backward": {GATHER: 2, REDUCE: 3}}


def test_memory_of_gathered_units_comes_and_goes():
    """Between steps no unit is gathered; in forward the root and one block are."""

    def body(mesh):
        model, seen = shard(build("transformer"), mesh), []
        units = [m._get_fsdp_state().unit for m in model.modules() if isinstance(m, FSDPModule)]

        def gathered():
            return sum(section.gather.is_there for unit in units for section in unit.sections)

        one_step(model)
        assert gathered() == 0
        for layer in model.layers:
            layer.norm_in.register_forward_hook(lambda *unused: seen.append(gathered()))
        one_step(model)
        assert seen == [2] * 4
        assert gathered() == 0

    on_ranks(body, 2)
