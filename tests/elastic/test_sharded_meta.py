"""Models built on the meta device: every worker initialises unit by unit, keeps its cells, and never has the whole."""

from __future__ import annotations

import weakref

import pytest
import torch
from scripted_world import Rows
from sharded_training import Named, train, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx.comm import simulate
from phalanx.elastic import Job, RunOptions, Saves, materialise
from phalanx.errors import RankFailed
from phalanx.fsdp import fully_shard


class Scale(nn.Module):
    """A parameter and a buffer that reset_parameters sets, one of them at random."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(5))
        self.register_buffer("offset", torch.empty(5))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.factor, 0.5, 1.5)
        self.offset.fill_(0.25)

    def forward(self, x):
        return x * self.factor + self.offset


def build(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 40), nn.LayerNorm(40), nn.Linear(40, 40), nn.Linear(40, 5), Scale())
        model[3].again = model[3].bias
        return model


class Both:
    def __init__(self, ema, named) -> None:
        self.ema, self.named = ema, named

    def update(self, model) -> None:
        self.ema.update_parameters(model)
        self.named.update(model)


def make_job(group, *, sharded, model=None, seed=7, saves=None):
    model = build("meta") if model is None else model
    if not sharded:
        materialise(model, seed=seed)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if sharded:
        for block in (model[0], model[2]):
            fully_shard(block)
        fully_shard(model)
    named = Named(model)
    job = Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        Rows(),
        num_slots=8,
        slot_batch_size=4,
        seed=seed,
        state={"ema": ema, "named": named},
        run=RunOptions(progress=False, group=group, verify=True, threads=1),
        saves=saves,
        **({"copies": 2} if sharded else {}),
    )
    job.count = Both(ema, named)
    return job


def run(group, sharded, max_steps=3, saves=None):
    job = make_job(group, sharded=sharded, saves=saves)
    told = train(job, max_steps=max_steps)
    job.saving.wait_idle()
    return told, weights(job)


def test_any_number_of_workers_begins_with_the_values_of_materialise_and_keeps_the_generators_of_the_script():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    materialise(build("meta"), seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    expected = run(None, False)
    for size in (1, 3):
        for found in simulate(size).run(run, True):
            assert found == expected, size


def test_a_save_takes_the_place_of_initial_values(tmp_path):
    saves = Saves(directory=tmp_path, every=2)
    expected = run(None, False, 5)
    simulate(2).run(run, True, 2, saves)
    for found in simulate(3).run(run, True, 5, saves):
        assert found == (expected[0][2:], expected[1])


def test_no_worker_has_the_parameters_of_two_units(monkeypatch):
    seen: list[weakref.ref] = []
    reset = nn.Linear.reset_parameters

    def watched(self):
        assert all(one() is None for one in seen), "an earlier unit is still there"
        reset(self)
        if self.out_features == 40:  # the last linear layer is in one unit with others
            seen.append(weakref.ref(self.weight))

    model = build("meta")
    monkeypatch.setattr(nn.Linear, "reset_parameters", watched)
    job = make_job(None, sharded=True, model=model)
    train(job, max_steps=1)
    assert len(seen) == 2


def test_what_has_no_values_is_named():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(5))

    class Half(Bare):
        def reset_parameters(self) -> None:
            self.weight[:3] = 1.0

    def begin(group, kind):
        model = nn.Sequential(nn.Linear(8, 5), kind()).to("meta")
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = RunOptions(progress=False, group=group)
        Job(model, optimizer, Rows(), num_slots=4, slot_batch_size=4, run=run).begin()

    with pytest.raises(
        RankFailed, match=r"module '1' \(Bare\) was built on the meta device and has no reset_parameters"
    ):
        simulate(2).run(begin, Bare)
    with pytest.raises(RankFailed, match=r"of module '1' \(Half\) has not written all values of 'weight'"):
        simulate(2).run(begin, Half)
    with pytest.raises(ValueError, match="has no reset_parameters"):
        materialise(nn.Sequential(Bare()).to("meta"))
