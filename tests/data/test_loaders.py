"""The samplers in torch's DataLoader and torchdata's StatefulDataLoader, with and without workers."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, WithWeights

fast = pytest.mark.fast
# torchdata 0.11 calls a function that torch 2.13 has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more than this machine has processors
]


class Squares(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, index * index])


class ManySquares(Squares):
    """A dataset that reads a whole batch at once."""

    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [self[index] for index in indices]


def indices_of(batch):
    assert torch.equal(batch[:, 1], batch[:, 0] ** 2)
    return batch[:, 0].tolist()


def worker_options(num_workers, persistent=False):
    return {"num_workers": num_workers, "persistent_workers": persistent} if num_workers else {}


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_a_loader_gives_the_samplers_epochs(num_workers):
    sampler = ElasticDistributedSampler(Squares(41), 2, 1)
    loader = DataLoader(Squares(41), batch_size=4, sampler=sampler, **worker_options(num_workers, persistent=True))
    assert len(loader) == 6
    for epoch in range(3):
        reference = ElasticDistributedSampler(Squares(41), 2, 1)
        for each in (sampler, reference):
            each.set_epoch(epoch)
        assert [index for batch in loader for index in indices_of(batch)] == list(reference)


@pytest.mark.parametrize("data", [Squares(10), ManySquares(10)])
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_masked_means_are_exact(data, num_workers):
    total = torch.zeros(())
    weights = torch.zeros(())
    for rank in range(4):
        sampler = ElasticDistributedSampler(data, 4, rank, shuffle=False, tail="mask")
        loader = DataLoader(WithWeights(data), batch_size=2, sampler=sampler, **worker_options(num_workers))
        for batch, weight in loader:
            total += (batch[:, 1] * weight).sum()
            weights += weight.sum()
    assert weights == 10
    assert total / weights == sum(i * i for i in range(10)) / 10


@fast
def test_weights_keep_the_datasets_length_and_single_items():
    data = WithWeights(Squares(3))
    assert len(data) == 3
    assert data[2][0].tolist() == [2, 4]


def train_with_loaders(length, num_slots, slot_batch_size, tail, events, num_workers):
    """Train two epochs with real loaders, through aborts and regroups; return what was committed."""

    def start(workers, state):
        samplers = [
            ElasticBatchSampler(range(length), num_slots, slot_batch_size, slots=[], tail=tail) for _ in range(workers)
        ]
        for rank, sampler in enumerate(samplers):
            sampler.resize(workers, rank)
            if state is not None:
                sampler.load_state_dict(state)
        loaders = [
            DataLoader(Squares(length), batch_sampler=s, **worker_options(num_workers, persistent=True))
            for s in samplers
        ]
        return samplers, loaders, [iter(loader) for loader in loaders]

    committed, events = [], list(events)
    samplers, loaders, iterators = start(2, None)
    while samplers[0].epoch < 2:
        step = samplers[0].step
        batches = [
            indices_of(next(iterator)) if sampler.indices(step, slot) else []
            for sampler, iterator in zip(samplers, iterators, strict=True)
            for slot in sampler.slots
        ]
        event = events.pop() if events else 0
        if event < 0:  # abort: loaders that have read ahead are made anew
            iterators = [iter(loader) for loader in loaders]
            continue
        for sampler in samplers:
            sampler.commit(step)
        committed += batches
        if event > 0:  # regroup with so many workers
            samplers, loaders, iterators = start(event, json.loads(json.dumps(samplers[-1].state_dict())))
        elif samplers[0].end_of_epoch(step) == step + 1:
            iterators = [iter(loader) for loader in loaders]
    return committed


def check_loaders(length, num_slots, slot_batch_size, tail, events, num_workers):
    committed = train_with_loaders(length, num_slots, slot_batch_size, tail, events, num_workers)
    reference = ElasticBatchSampler(range(length), num_slots, slot_batch_size, slots=[], tail=tail)
    steps = len(committed) // num_slots
    assert steps >= 2 * reference.steps_per_epoch
    assert committed == [reference.indices(s, k) for s in range(steps) for k in range(num_slots)]


loader_arguments = {
    "length": st.integers(12, 40),
    "num_slots": st.integers(1, 4),
    "slot_batch_size": st.integers(1, 3),
    "tail": st.sampled_from(["pad", "drop", "uneven", "mask"]),
    "events": st.lists(st.integers(-1, 3), max_size=6),
}


@fast
@pytest.mark.filterwarnings("ignore:step .* is issued again")  # that is what an abort is for
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(**loader_arguments)
def test_aborts_and_regroups_through_loaders(**example):
    check_loaders(**example, num_workers=0)


@pytest.mark.filterwarnings("ignore:step .* is issued again")
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(**loader_arguments)
def test_aborts_and_regroups_through_loaders_with_persistent_workers(**example):
    check_loaders(**example, num_workers=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:step .* is issued again")
@settings(max_examples=60, deadline=None, database=None)
@given(**loader_arguments)
def test_aborts_and_regroups_through_loaders_with_persistent_workers_long(**example):
    check_loaders(**example, num_workers=2)


def test_read_ahead_of_workers_is_not_consumed():
    sampler = ElasticBatchSampler(range(32), 2, 2, slots=[0])
    loader = DataLoader(Squares(32), batch_sampler=sampler, num_workers=2, prefetch_factor=2)
    iterator = iter(loader)
    first = indices_of(next(iterator))
    assert sampler.state_dict()["position"] == 0
    sampler.commit(0)
    assert sampler.state_dict()["position"] == 4
    second = indices_of(next(iterator))
    assert indices_of(next(iter(loader))) == second  # step 1 was aborted: its samples are issued again
    assert first == sampler.indices(0, 0)


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_a_prefetching_loader_resumes_from_what_was_used(num_workers):
    """The caller counts what it trained on; what the loader has read ahead does not matter."""
    trained = []
    samplers = [ElasticDistributedSampler(Squares(60), 2, rank) for rank in range(2)]
    loaders = [
        DataLoader(Squares(60), batch_size=3, sampler=sampler, **worker_options(num_workers)) for sampler in samplers
    ]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(4):
        trained += [index for iterator in iterators for index in indices_of(next(iterator))]
    states = [sampler.state_dict(consumed=12) for sampler in samplers]
    assert states[0] == states[1]
    for rank in range(3):
        resumed = ElasticDistributedSampler(Squares(60), 3, rank)
        resumed.load_state_dict(states[0])
        loader = DataLoader(Squares(60), batch_size=3, sampler=resumed, **worker_options(num_workers))
        trained += [index for batch in loader for index in indices_of(batch)]
    assert sorted(trained) == list(range(60))


@pytest.mark.parametrize("stop_after", [0, 1, 3, 10])
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_stateful_loader_saves_and_restores_replicas(num_workers, stop_after):
    def make():
        sampler = ElasticDistributedSampler(Squares(40), 2, 1)
        sampler.set_epoch(0)  # as a loop over epochs does; the state is loaded later, when iteration begins
        return StatefulDataLoader(Squares(40), batch_size=2, sampler=sampler, **worker_options(num_workers))

    reference = [indices_of(batch) for batch in make()]
    loader = make()
    iterator = iter(loader) if stop_after else None
    seen = [indices_of(next(iterator)) for _ in range(stop_after)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    seen += [indices_of(batch) for batch in resumed]
    assert seen == reference
    assert resumed.sampler.epoch == 0


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_stateful_loader_restores_at_another_world_size(num_workers):
    def make(count, rank):
        sampler = ElasticDistributedSampler(Squares(40), count, rank, tail="uneven")
        return StatefulDataLoader(Squares(40), batch_size=2, sampler=sampler, **worker_options(num_workers))

    seen, loaders = [], [make(2, rank) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(4):
        seen += [index for iterator in iterators for index in indices_of(next(iterator))]
    state = loaders[0].state_dict()
    for rank in range(3):
        resumed = make(3, rank)
        resumed.load_state_dict(state)
        seen += [index for batch in resumed for index in indices_of(batch)]
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("slots", [[1], [0, 1]])
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=fast), 2])
def test_stateful_loader_saves_and_restores_slots(num_workers, slots):
    """What the loader has delivered counts, to the batch; the sampler itself counts commits."""

    def make():
        sampler = ElasticBatchSampler(range(24), 2, 2, slots=slots)
        return sampler, StatefulDataLoader(Squares(24), batch_sampler=sampler, **worker_options(num_workers))

    reference = [indices_of(batch) for batch in make()[1]]
    for stop_after in range(1, len(reference)):
        sampler, loader = make()
        seen = []
        for batch in loader:
            seen.append(indices_of(batch))
            if len(seen) % len(slots) == 0:
                sampler.commit(sampler.step)
            if len(seen) == stop_after:
                break
        resumed_sampler, resumed = make()
        resumed.load_state_dict(loader.state_dict())
        for batch in resumed:
            seen.append(indices_of(batch))
            if len(seen) % len(slots) == 0:
                resumed_sampler.commit(len(seen) // len(slots) - 1)
        assert seen == reference
        assert resumed_sampler.epoch == 1


@fast
def test_stateful_loader_refuses_steps_of_another_size_and_restarts_a_step_for_other_slots():
    def make(slots, slot_batch_size=2):
        sampler = ElasticBatchSampler(range(24), 2, slot_batch_size, slots=slots)
        return StatefulDataLoader(Squares(24), batch_sampler=sampler), sampler

    loader, sampler = make([0, 1])
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    sampler.commit(0)
    state = loader.state_dict()
    other, _ = make([0, 1], slot_batch_size=3)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="steps of 4 samples, but steps have 6 now"):
        iter(other)
    moved, moved_sampler = make([0])
    moved.load_state_dict(state)
    assert indices_of(next(iter(moved))) == moved_sampler.indices(1, 0)
