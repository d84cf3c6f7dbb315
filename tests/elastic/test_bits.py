"""Same bits: any number of simulated workers, a save in the middle, loader processes, a loop written by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from elastic_training import (
    NUM_SLOTS,
    SEED,
    SLOT_BATCH,
    Mean,
    Pictures,
    make_job,
    make_model,
    make_optimizer,
    train,
)
from torch.nn import functional as F

from phalanx.comm import simulate
from phalanx.data import ElasticBatchSampler
from phalanx.elastic import RunOptions, Saves
from phalanx.elastic._rng import derive_seed
from phalanx.elastic.reduce._norm_blocks import naive_block_sums
from phalanx.elastic.reduce._slots import fold

QUIET = RunOptions(progress=False)


def run(group, kind, **keywords):
    job = make_job(kind, run=RunOptions(progress=False, group=group, verify=True), **keywords)
    return train(job, epochs=1), job.digest()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_any_number_of_workers_gives_the_same_bits(kind):
    losses, digest = run(None, kind)
    assert len(losses) == 7
    for size in (2, 3, 4, 5, 9):
        results = simulate(size).run(run, kind)
        assert {found for _, found in results} == {digest}, f"{size} workers"
        assert results[0][0] == losses


@pytest.mark.fast
def test_the_bits_are_those_of_a_loop_written_by_hand():
    """The naive reference: no Phalanx but the sampler, the seeds and the tree."""
    job = make_job("adamw", run=QUIET)
    losses = train(job, epochs=1)
    model = make_model()
    optimizer = make_optimizer("adamw", model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    mean, dataset = Mean(model), Pictures()
    sampler = ElasticBatchSampler(dataset, NUM_SLOTS, SLOT_BATCH, slots=(), seed=SEED, tail="uneven")
    params = list(model.parameters())
    for step in range(sampler.steps_per_epoch):
        start = [b.clone() for b in model.buffers()]
        leaves, used, total, kept = {}, [False] * len(params), 0.0, None
        for slot in range(NUM_SLOTS):
            indices = sampler.indices(step, slot)
            for buffer, value in zip(model.buffers(), start, strict=True):
                buffer.copy_(value)
            model.zero_grad()
            if indices:
                seed_all(derive_seed(SEED, "data", step, slot, 0))
                samples = [dataset[i] for i in indices]
                x, y = (torch.stack(column) for column in zip(*samples, strict=True))
                seed_all(derive_seed(SEED, "compute", step, slot, 0))
                weight = len(indices) / SLOT_BATCH
                (F.cross_entropy(model(x), y) * weight).backward()
                total += weight
            leaves[slot, slot + 1] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
            used = [u or p.grad is not None for u, p in zip(used, params, strict=True)]
            if slot == 0:
                kept = [b.clone() for b in model.buffers()]
        sums = fold(NUM_SLOTS, leaves, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
        for param, value, is_used in zip(params, sums, used, strict=True):
            param.grad = value / total if is_used else None
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        clip_naively(params, 1.0)
        optimizer.step()
        scheduler.step()
        mean.update(model)
    assert len(losses) == sampler.steps_per_epoch
    for name, value in model.state_dict().items():
        assert torch.equal(value, job.model.state_dict()[name]), name
    for ours, wanted in zip(job.mean.values, mean.values, strict=True):
        assert torch.equal(ours, wanted)


def clip_naively(params, max_norm):
    """Blocks of each parameter, one at a time, then the tree over all blocks."""
    sums = naive_block_sums([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
    while len(sums) & (len(sums) - 1):
        sums.append(0.0)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    for p in params:
        if p.grad is not None:
            p.grad.mul_(min(1.0, max_norm / (sums[0] ** 0.5 + 1e-6)))


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def test_gradient_accumulation_inside_a_slot_gives_the_same_bits_on_any_number_of_workers():
    _, digest = run(None, "adamw", parts=2)
    assert digest != run(None, "adamw")[1], "parts draw their own random numbers"
    assert {found for _, found in simulate(3).run(run, "adamw", parts=2)} == {digest}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine has processors
def test_loader_processes_give_the_same_bits():
    job = make_job(run=QUIET, num_workers=2, length=70)
    train(job, epochs=2)
    plain = make_job(run=QUIET, length=70)
    train(plain, epochs=2)
    assert job.digest() == plain.digest()


@pytest.mark.parametrize("sizes", [(1, 3), (4, 1), (2, 5)])
def test_a_save_in_the_middle_resumes_at_another_world_size_with_the_same_bits(tmp_path, sizes):
    _, digest = run(None, "adamw")

    def part(group, max_steps):
        saves = Saves(directory=tmp_path, every=2)
        job = make_job(saves=saves, run=RunOptions(progress=False, group=group))
        train(job, max_steps=max_steps, wait_for_saves=True)
        return job.step, job.digest()

    simulate(sizes[0]).run(part, 4)
    found = [path.name for path in sorted(tmp_path.iterdir())]
    assert found == ["last-good", "step-000000000002", "step-000000000004"]
    assert simulate(sizes[1]).run(part, 7) == [(7, digest)] * sizes[1]


def test_a_state_of_another_seed_is_refused():
    job = make_job(run=QUIET)
    with pytest.raises(ValueError, match="seed 4, this one has 3"):
        job.load_state_dict({**job.state_dict(), "seed": 4})
