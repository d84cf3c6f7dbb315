"""Loader processes: each reads for its own slots, and lives through epochs and regroups."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import ElasticBatchSampler, ShardedDataset
from phalanx.elastic._loader_processes import Attributes, bind, reader_of
from phalanx.elastic._loading import Fetcher, Loading, Schedule
from sharded_samples import Numbers

SLOTS = st.lists(st.integers(0, 15), unique=True, max_size=12).map(sorted)


@pytest.mark.fast
@settings(max_examples=200, deadline=None)
@given(SLOTS, SLOTS, st.integers(1, 9))
def test_slots_are_shared_out_fairly_and_stay_where_they_were(before, after, num_processes):
    first = bind(before, num_processes, {})
    second = bind(after, num_processes, first)
    for slots, bound in ((before, first), (after, second)):
        assert list(bound) == slots
        assert all(len(set(readers)) == len(readers) >= 1 for readers in bound.values())
        loads = [sum(number in readers for readers in bound.values()) for number in range(num_processes)]
        if slots:
            assert max(loads) - min(loads) <= 1 or max(loads) <= -(-len(slots) // num_processes)
            assert min(loads) >= 1 or len(slots) >= num_processes, "none is idle while another could be helped"
    if len(after) >= num_processes and set(after) <= set(before):
        room = -(-len(after) // num_processes)
        for number in range(num_processes):
            kept = [slot for slot in after if first[slot][0] == number]
            assert sum(second[slot] == (number,) for slot in kept) == min(len(kept), room)
    for step in range(3):
        for slot in after:
            assert reader_of(second, step, slot) in second[slot]


class WithProcess(ShardedDataset):
    """Samples with the process that read them, and a level that a loop may set."""

    level = 0

    def __getitems__(self, indices):
        return [[sample, os.getpid(), self.level] for sample in super().__getitems__(indices)]


def test_processes_live_through_epochs_and_regroups_and_keep_their_slots():
    dataset = WithProcess(Numbers([7] * 8))
    sampler = ElasticBatchSampler(dataset, 4, 2, slots=(), shuffle="shards", tail="uneven")
    schedule = Schedule(sampler, 1)
    loading = Loading(Fetcher(dataset, torch.tensor, 0), 2)
    state = torch.random.get_rng_state()

    def steps(slots, count):
        """Train some steps with these slots; which process read for each slot, and what level it saw."""
        loading.follow(schedule, slots)
        readers, levels = {}, set()
        for _ in range(count):
            for slot in slots:
                for ticket in schedule.tickets(sampler.step, slot):
                    batch = loading.batch(ticket)
                    assert batch[:, 0].tolist() == list(ticket.indices)
                    readers.setdefault(slot, set()).update(batch[:, 1].tolist())
                    levels |= set(batch[:, 2].tolist())
            sampler.commit(sampler.step)
        return readers, levels

    first, _ = steps([0, 1], 2)
    assert all(len(processes) == 1 for processes in first.values())
    assert first[0] != first[1]
    second, _ = steps([0, 1, 2, 3], 2)  # two slots more: a regroup in the middle of what was read ahead
    assert {slot: second[slot] for slot in (0, 1)} == first
    third, _ = steps([1, 2], 3)  # to the end of the epoch
    assert third == {slot: second[slot] for slot in (1, 2)}
    assert sampler.epoch == 1
    fourth, levels = steps([1, 2], 1)
    assert fourth == third
    assert levels == {0}
    assert torch.equal(torch.random.get_rng_state(), state), "the user's generator is left alone"
    processes = {next(iter(pids)) for pids in second.values()}
    assert all(psutil.pid_exists(pid) for pid in processes)
    dataset.level = 5  # forked processes would not see it
    fifth, levels = steps([1, 2], 1)
    assert levels == {5}
    assert not fifth[1] & processes
    lonely, _ = steps([2], 2)
    assert len(lonely[2]) == 2, "two processes read for one slot in turn"
    loading.close()
    assert not any(psutil.pid_exists(pid) for pids in (*fifth.values(), *lonely.values()) for pid in pids)


@pytest.mark.fast
def test_what_a_loop_sets_on_a_dataset_is_noticed():
    class Inner:
        def __init__(self):
            self.table = torch.zeros(3)

    class Outer:
        def __init__(self):
            self.dataset = Inner()
            self.name, self.items = "a", [1]

    dataset = Outer()
    before = Attributes(dataset)
    assert before.are_those_of(dataset)
    for change in (
        lambda: dataset.dataset.table.add_(1),
        lambda: setattr(dataset, "name", "b"),
        lambda: setattr(dataset, "items", [1]),
        lambda: setattr(dataset.dataset, "more", 1),
    ):
        before = Attributes(dataset)
        change()
        assert not before.are_those_of(dataset)
        assert Attributes(dataset).are_those_of(dataset)
    assert not before.are_those_of(Outer())
    assert Attributes(range(3)).are_those_of(range(3)) is False, "another object, for what is known of it"
