"""Shards and random histories: workers come and go, steps are dropped, runs resume with other slots and batches.

Every sample comes once per epoch, in the order of an undisturbed run, and few shards are opened.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, ShardedDataset, ShardOrder
from phalanx.data._partition import slots_of
from phalanx.elastic._loading import Fetcher, Loading, Schedule
from sharded_samples import Numbers

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:.*shards for .* lanes")]

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)


class Worker:
    """One process of a job, as far as its data goes: what a job's own loading does."""

    def __init__(self, sizes, num_slots, slot_batch, window, state=None):
        self.source = Numbers(sizes)
        dataset = ShardedDataset(self.source)
        order = ShardOrder(dataset, window=window)
        self.sampler = ElasticBatchSampler(dataset, num_slots, slot_batch, slots=(), order=order, tail="uneven", seed=4)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.schedule = Schedule(self.sampler, 1)
        self.loading = Loading(Fetcher(dataset, list, 4), 0)
        self.carried = set()

    def follow(self, slots):
        self.slots = slots
        self.loading.follow(self.schedule, slots)

    def compute(self):
        step, seen = self.sampler.step, []
        for slot in self.slots:
            for window in self.sampler.windows(step, slot):
                self.carried |= {(self.sampler.epoch, slot, shard) for shard in window.shards}
            for ticket in self.schedule.tickets(step, slot):
                batch = self.loading.batch(ticket)
                assert batch == list(ticket.indices)
                seen += batch
        return seen


def undisturbed(sizes, lanes, run, window, epochs):
    order = ShardOrder(sizes, lanes=lanes, run=run, window=window)
    return [index for epoch in range(epochs) for index in order.at(4, epoch, np.arange(order.length)).tolist()]


EVENTS = st.lists(
    st.one_of(
        st.just("drop"),
        st.tuples(st.just("regroup"), st.integers(1, 5)),
        st.tuples(st.just("resume"), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
        st.none(),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), EVENTS)
def test_each_sample_once_per_epoch_in_one_order_whatever_happens(sizes, num_slots, batch, window, num_workers, events):
    run_history(sizes, num_slots, batch, window, num_workers, events)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), EVENTS)
def test_each_sample_once_per_epoch_over_thousands_of_histories(sizes, num_slots, batch, window, num_workers, events):
    run_history(sizes, num_slots, batch, window, num_workers, events)


def run_history(sizes, num_slots, batch, window, num_workers, events):
    expected = undisturbed(sizes, num_slots, batch, window, epochs=2)

    def place(workers):
        for rank, worker in enumerate(workers):
            worker.follow(slots_of(rank, len(workers), worker.sampler.num_slots))

    workers = [Worker(sizes, num_slots, batch, window) for _ in range(num_workers)]
    place(workers)
    committed, events = [], list(events)
    while workers[0].sampler.epoch < 2:
        seen = [index for worker in workers for index in worker.compute()]
        event = events.pop() if events else None
        if event == "drop":
            place(workers)
            continue
        committed += seen
        for worker in workers:
            worker.sampler.commit(worker.sampler.step)
        if event is None:
            if workers[0].sampler.epoch and len(committed) == sum(sizes):
                place(workers)  # as a job does at the beginning of an epoch
        elif event[0] == "regroup":
            state = workers[0].sampler.state_dict()
            fresh = [Worker(sizes, *sizes_of(workers[0]), window, state) for _ in range(event[1] - len(workers))]
            workers = [*workers[: event[1]], *fresh]
            place(workers)
        else:
            state = json.loads(json.dumps(workers[-1].sampler.state_dict()))
            workers = [Worker(sizes, event[2], event[3], window + 1, state) for _ in range(event[1])]
            place(workers)
    assert committed == expected
    assert sorted(committed[: sum(sizes)]) == list(range(sum(sizes)))


def sizes_of(worker):
    return worker.sampler.num_slots, worker.sampler.slot_batch_size


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=6, max_size=30).filter(any),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=6),
)
def test_a_worker_opens_the_shards_of_its_lanes_and_few_more_at_a_regroup(sizes, num_slots, batch, window, regroups):
    """At most those of its lanes, and slots x window for each regroup; and slots x window are open at a time."""
    workers = [Worker(sizes, num_slots, batch, window) for _ in range(4)]
    count, turns, done = 4, list(regroups), 0
    due = turns.pop(0) if turns else None
    for rank, worker in enumerate(workers):
        worker.follow(slots_of(rank, count, num_slots))
    while workers[0].sampler.epoch < 2:
        for worker in workers[:count]:
            worker.compute()
        for worker in workers:
            worker.sampler.commit(worker.sampler.step)
        if due is not None and workers[0].sampler.step % due[0] == 0:
            count, done = due[1], done + 1
            due = turns.pop(0) if turns else None
            for rank, worker in enumerate(workers[:count]):
                worker.follow(slots_of(rank, count, num_slots))
    for worker in workers:
        assert sum(worker.source.opened.values()) <= len(worker.carried) + done * num_slots * window
        assert worker.source.most_open <= 2 * num_slots * window, "twice, where a slot's batch is in two windows"


def test_misses_over_many_shards_are_few():
    """10,000 shards, 120 steps, 4 of 8 slots: a worker opens what its lanes come to, not a shard for every sample."""
    worker = Worker([100] * 10_000, 8, 8, 8)
    worker.follow(range(4))
    for _ in range(120):
        worker.compute()
        worker.sampler.commit(worker.sampler.step)
    windows = -(-120 * 8 // 800) + 1  # of a lane, of which the first may be short
    assert sum(worker.source.opened.values()) <= 4 * 8 * windows
    assert worker.source.most_open <= 2 * 4 * 8, "twice, where a slot's batch is in two windows"
    full = ElasticBatchSampler(ShardedDataset(Numbers([100] * 10_000)), 8, 8, slots=range(4))
    opened = {index // 100 for step in range(120) for slot in range(4) for index in full.indices(step, slot)}
    assert len(opened) > 20 * sum(worker.source.opened.values()), "which a full shuffle does"


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=6))
def test_replicas_that_change_in_number_share_one_order(sizes, lives):
    """``ElasticDistributedSampler``: the same order at any world size, resumed anywhere."""
    dataset = ShardedDataset(Numbers(sizes))
    whole = list(ElasticDistributedSampler(dataset, 1, 0, shuffle="shards", tail="uneven"))
    state, taken = None, []
    for replicas, rounds in [*lives, (1, 10**6)]:
        samplers = [
            ElasticDistributedSampler(dataset, replicas, rank, shuffle="shards", tail="uneven")
            for rank in range(replicas)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(0)
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(rounds):
            row = [index for index in (next(iterator, None) for iterator in iterators) if index is not None]
            taken += row
            if len(row) < replicas:
                break
        state = json.loads(json.dumps(samplers[0].state_dict()))
    assert taken == whole
