"""The sharded job as its user sees it: mistakes are named, precision mixes, scalers scale, evaluation counts once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from elastic_training import Count
from sharded_training import Blocks, Rows, build, make_job, make_optimizer, train, weights
from torch import nn
from torch.nn import functional as F

from phalanx.comm import observe, simulate
from phalanx.elastic import Job, NonFinite, Outcome, RunOptions
from phalanx.errors import RankFailed
from phalanx.fsdp import fully_shard

QUIET = RunOptions(progress=False, threads=1)


def alone(model, optimizer=None, **keywords):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    keywords.setdefault("run", QUIET)
    count = Count()
    job = Job(model, optimizer, Rows(), num_slots=4, slot_batch_size=4, state={"count": count}, **keywords)
    job.count = count
    return job


def one_step(job, *, backward=True):
    for step in job.steps(max_steps=1):
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        step.commit()


def test_mistakes_in_the_constructor_are_named():
    plain = nn.Linear(8, 5)
    with pytest.raises(ValueError, match="copies=2 needs a model that is sharded"):
        alone(plain, copies=2)
    with pytest.raises(ValueError, match="copies is 0; expected 'all' or a number"):
        alone(plain, copies=0)
    with pytest.raises(ValueError, match="spread is 'rack'"):
        alone(plain, spread="rack")
    model = Blocks()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    with pytest.raises(ValueError, match="not the model's; build the optimizer"):
        alone(model, early)
    with pytest.raises(ValueError, match="a Job cannot use LBFGS: it computes the gradient several times"):
        alone(model, torch.optim.LBFGS(model.parameters()))
    model = Blocks()
    fully_shard(model.first)
    with pytest.raises(ValueError, match=r"fully_shard was called on parts of the model and not on the model itself"):
        alone(model)
    model = build(sharded=True)
    model.extra.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(ValueError, match="'extra' of unit 'root' has hooks on its gradient"):
        alone(model)


def test_what_would_be_silently_wrong_is_refused():
    model = build(sharded=True)
    optimizer = make_optimizer("adamw", model)
    before = weakref.ref(model.first.weight._local)
    job = alone(model, optimizer, copies=1)
    one_step(job)
    gc.collect()
    assert before() is None, "the model that fully_shard left is not kept beside the cells"
    with pytest.raises(RuntimeError, match=r"job\.full_state_dict\(\) collects the model's"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"of parameter 'first\.weight' outside of forward and backward"):
        model.first.weight.sum()
    with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) outside of step\.commit\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"ran outside of a step and of job\.evaluate\(\)"):
        model(torch.zeros(2, 8))
    with pytest.raises(RuntimeError, match="a hook on the gradient of parameter"):
        model.extra.register_post_accumulate_grad_hook(lambda param: None)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Blocks().parameters())
    assert set(job.full_state_dict()) == set(Blocks().state_dict())


class Switch(nn.Module):
    """Runs its blocks in an order that depends on the data."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=bias), nn.Linear(8, 5)

    def forward(self, x):
        first, second = (self.one, self.two) if x[0, 0] > 0 else (self.two, self.one)
        return self.last(second(first(x)))


@pytest.mark.parametrize("size", [2, 3])
def test_units_that_run_in_another_order_on_some_worker_are_named(size):
    def main(group):
        torch.manual_seed(0)
        model = Switch()
        fully_shard(model.one)
        fully_shard(model.two)
        fully_shard(model)
        one_step(alone(model, run=RunOptions(progress=False, group=group), copies=1))

    with pytest.raises(RankFailed, match=r"unit '(one|two)' where rank \d gathers unit '(one|two)'"):
        simulate(size).run(main)


def test_a_scaler_that_skips_and_several_dtypes_give_the_bits_of_the_unsharded_job():
    def run(group, sharded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 5))
        model.register_parameter("factor", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
        forward = model.forward
        model.forward = lambda x: forward(x) * model.factor * 8
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
        run = RunOptions(progress=False, threads=1, group=group)
        job = alone(model, scaler=scaler, run=run, **({"copies": 2} if sharded else {}))
        return train(job, max_steps=6), weights(job), scaler.get_scale()

    expected = run(None, False)
    assert expected[2] < 2.0**127, "it was scaled down"
    for found in simulate(3).run(run, True):
        assert found == expected


def test_a_loss_that_is_not_finite_stops_all_workers_and_names_slot_and_samples():
    def main(group):
        job = make_job(group=group, copies=2)
        outcomes = []

        def train_on():
            for step in job.steps(max_steps=2):
                for micro in step:
                    loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
                    micro.backward(loss * float("nan") if micro.slot == 5 else loss)
                outcomes.append(step.commit())

        with pytest.raises(NonFinite, match=r"slot 5 \(worker rank2\): loss is nan.*samples") as caught:
            train_on()
        assert outcomes == [Outcome.DROPPED], "it is computed again, to see where it comes from"
        return list(caught.value.slots)

    assert simulate(3).run(main) == [[5]] * 3


def test_a_batch_without_weight_counts_for_nothing_and_evaluation_is_that_of_one_worker():
    def run(group, sharded):
        job = make_job(sharded=sharded, group=group, copies=2)
        for step in job.steps(max_steps=3):
            for micro in step:
                loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
                micro.backward(loss, weight=0.0 if micro.slot == 2 else None)
            step.commit()
        score = job.evaluate(Rows(30), lambda b: {"loss": F.cross_entropy(job.model(b[0]), b[1])}, batch_size=4)
        return weights(job), score, job.digest()

    expected = run(None, False)
    for found in simulate(3).run(run, True):
        assert found == expected


def test_the_digest_moves_digests_and_no_weights():
    """Of 2 MB of weights, of which each worker holds two thirds."""

    def main(group):
        model = fully_shard(torch.nn.Linear(1024, 512))
        optimizer = torch.optim.AdamW(model.parameters())
        run = RunOptions(progress=False, group=group, threads=1)
        job = Job(model, optimizer, Wide(), num_slots=3, slot_batch_size=1, copies=2, run=run)
        moved = []
        for step in job.steps(max_steps=2):
            for micro in step:
                micro.backward(job.model(micro.inputs).square().mean())
            step.commit()
            if step.number == 0:
                with observe(lambda event: moved.append(event.nbytes)):
                    digest = job.digest()
        return digest, sum(moved), len(moved)

    found = simulate(3).run(main)
    assert len({digest for digest, _, _ in found}) == 1
    for _, nbytes, count in found:
        assert count > 0
        assert 0 < nbytes < 128 << 10


class Wide(torch.utils.data.Dataset):
    """Rows of 1,024 numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((1024,), float(index)), 0
