"""Any history of resizes, commits, aborts, saves and restores uses exactly one epoch, in one order.

The reference of each history is the undisturbed run on one replica. A history drives all replicas in
step, as training does; what is "used" is what would have been trained.
"""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, weight_of

TAILS = ["pad", "drop", "uneven", "mask"]
SHUFFLES = st.sampled_from([True, False, "block"])
#: The same examples in every run, so that a failure is never a matter of luck.
STEADY = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LONG = settings(max_examples=5000, deadline=None, database=None)

steps_of_history = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 12)),
        st.tuples(st.just("resize"), st.integers(1, 7)),
        st.tuples(st.just("give_back"), st.integers(1, 7), st.integers(0, 5)),
        st.tuples(st.just("restore"), st.integers(1, 7)),
        st.tuples(st.just("restore_prefetched"), st.integers(1, 7), st.integers(0, 5)),
    ),
    max_size=12,
)


class Replicas:
    """All replicas of a run, in step, and what they have used."""

    def __init__(self, length, count, options):
        self.length, self.options = length, options
        self.used: list[int] = []
        self.since = 0  # where in `used` the rounds that can be given back begin
        self.start(count)

    def start(self, count, state=None):
        self.samplers = [
            ElasticDistributedSampler(range(self.length), count, rank, **self.options)
            for rank in range(count)
        ]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(state)
        self.iterate()

    def iterate(self):
        # Naming the epoch again, as a training loop that is entered anew does.
        for sampler in self.samplers:
            sampler.set_epoch(sampler.epoch)
        self.iterators = [iter(sampler) for sampler in self.samplers]
        self.rounds: list[list[int]] = []

    def train(self, rounds):
        for _ in range(rounds):
            taken = [next(iterator, None) for iterator in self.iterators]
            self.rounds.append([index for index in taken if index is not None])

    def settle(self, rounds=None):
        """Count the rounds so far, or the first of them, as used."""
        done = self.rounds if rounds is None else self.rounds[:rounds]
        self.used += [index for taken in done for index in taken]
        self.rounds = []

    def states(self, consumed=None):
        states = [json.loads(json.dumps(s.state_dict(consumed))) for s in self.samplers]
        assert all(state == states[0] for state in states), "replicas in step must save the same state"
        return states[0]


def run_history(length, count, history, options):
    run = Replicas(length, count, options)
    for action, *numbers in history:
        limit = length if options["tail"] == "drop" else 99
        new_count = min(numbers[0], limit)
        if action == "train":
            run.train(numbers[0])
        elif action == "resize":
            run.settle()
            if new_count <= len(run.samplers):
                run.samplers, run.iterators = run.samplers[:new_count], run.iterators[:new_count]
                for rank, sampler in enumerate(run.samplers):
                    sampler.resize(new_count, rank)  # survivors go on with their iterators
            else:
                run.start(new_count, run.states())  # newcomers load a survivor's state
        elif action == "restore":
            run.settle()
            run.start(new_count, run.states())
        else:
            run.give_back_to = max(0, len(run.rounds) - numbers[1])
            kept = min(
                run.give_back_to, run.samplers[0]._cursor.rounds_done if run.samplers[0]._cursor else 0
            )
            if action == "restore_prefetched":
                state = run.states(consumed=kept)
                run.settle(kept)
                run.start(new_count, state)
            else:
                run.settle(kept)
                survivors = run.samplers[:new_count]
                for rank, sampler in enumerate(survivors):
                    sampler.resize(len(survivors), rank, consumed=kept)
                run.samplers = survivors
                run.iterate()
    run.train(length + 1)
    run.settle()
    return run.used


def check_distributed(length, seed, epoch, shuffle, tail, count, history):
    count = min(count, length) if tail == "drop" else count
    options = {"seed": seed, "shuffle": shuffle, "tail": tail}
    if shuffle == "block":
        options["block_size"] = 5
    undisturbed = ElasticDistributedSampler(range(length), 1, 0, **options)
    expected = list(undisturbed)
    used = run_history(length, count, history, options)
    if tail == "uneven":
        assert used == expected
    elif tail == "drop":
        assert used == expected[: len(used)]
        assert len(used) > length - 8  # at most one round of the last 7 replicas is left out
    elif tail == "mask":
        assert [index for index in used if weight_of(index)] == expected
    else:
        assert used[:length] == expected
        assert used[length:] == [expected[position % length] for position in range(len(used) - length)]


arguments = {
    "length": st.integers(1, 70),
    "seed": st.integers(0, 2**64),
    "epoch": st.integers(0, 5),
    "shuffle": SHUFFLES,
    "tail": st.sampled_from(TAILS),
    "count": st.integers(1, 7),
    "history": steps_of_history,
}


@pytest.mark.fast
@STEADY
@given(**arguments)
def test_any_history_of_replicas_uses_one_epoch_in_order(**example):
    check_distributed(**example)


@pytest.mark.soak
@pytest.mark.timeout(600)
@LONG
@given(**arguments)
def test_any_history_of_replicas_uses_one_epoch_in_order_long(**example):
    check_distributed(**example)
