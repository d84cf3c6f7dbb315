"""Any history of resizes, commits, aborts, saves and restores uses exactly one epoch, in one order.

The reference of each history is the undisturbed run on one replica. A history drives all replicas in
step, as training does; what is "used" is what would have been trained.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, weight_of

TAILS = ["pad", "drop", "uneven", "mask"]
SHUFFLES = st.sampled_from([True, False, "block"])
#: The same examples in every run, so that a failure is never a matter of luck.
STEADY = settings(max_examples=80, deadline=None, derandomize=True, database=None)
LONG = settings(max_examples=2000, deadline=None, database=None)

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
    """All replicas of a run, in step, and what they have used.

    ``naming``: whether the training loop calls set_epoch. ``rolling``: whether it goes on after an epoch.
    """

    def __init__(self, length, count, options, *, naming=True, rolling=False):
        self.length, self.options, self.naming, self.rolling = length, options, naming, rolling
        self.used: list[int] = []
        self.rounds: list[list[int]] = []  # taken since the last settlement
        self.start(count)

    def start(self, count, state=None):
        self.samplers = [
            ElasticDistributedSampler(range(self.length), count, rank, **self.options) for rank in range(count)
        ]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(state)
        self.iterate()

    def iterate(self):
        # Naming the epoch again, as a training loop that is entered anew does.
        for sampler in self.samplers if self.naming else ():
            sampler.set_epoch(sampler.epoch)
        self.iterators = [iter(sampler) for sampler in self.samplers]
        self.rounds = []

    def train(self, rounds):
        for _ in range(rounds):
            taken = [next(iterator, None) for iterator in self.iterators]
            self.rounds.append([index for index in taken if index is not None])
            if self.rolling and not self.rounds[-1]:
                self.settle()
                for sampler in self.samplers if self.naming else ():
                    sampler.set_epoch(sampler.epoch + 1)
                self.iterators = [iter(sampler) for sampler in self.samplers]

    def settle(self, rounds=None):
        """Count the rounds so far, or the first of them, as used."""
        done = self.rounds if rounds is None else self.rounds[:rounds]
        self.used += [index for taken in done for index in taken]
        self.rounds = []

    def states(self, consumed=None):
        states = [json.loads(json.dumps(s.state_dict(consumed))) for s in self.samplers]
        assert all(state == states[0] for state in states), "replicas in step must save the same state"
        return states[0]


def run_history(run, length, history, options):
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
            # Rounds after the end are empty: nothing was given in them that could be used.
            kept = max(0, sum(map(bool, run.rounds)) - numbers[1])
            if run.rolling and not run.rounds:
                kept = None  # a pass that has not begun: nothing to count in yet
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
    run.train(2 * length + 2 if run.rolling else length + 1)
    run.settle()
    return run.used


def check_distributed(length, seed, epoch, shuffle, tail, count, history):
    count = min(count, length) if tail == "drop" else count
    options = {"seed": seed, "shuffle": shuffle, "tail": tail}
    if shuffle == "block":
        options["block_size"] = 5
    undisturbed = ElasticDistributedSampler(range(length), 1, 0, **options)
    undisturbed.set_epoch(epoch)
    expected = list(undisturbed)
    run = Replicas(length, count, options)
    for sampler in run.samplers:
        sampler.set_epoch(epoch)
    used = run_history(run, length, history, options)
    if tail == "uneven":
        assert used == expected
    elif tail == "drop":
        assert used == expected[: len(used)]
        assert len(used) > length - 7  # less than one round of 7 replicas is left out
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


def check_epochs(length, seed, tail, naming, count, history):
    """A run through many epochs uses their orders one after the other, whether or not epochs are named."""
    options = {"seed": seed, "tail": tail}
    run = Replicas(length, count, options, naming=naming, rolling=True)
    used = [index for index in run_history(run, length, history, options) if weight_of(index)]
    undisturbed = ElasticDistributedSampler(range(length), 1, 0, **options)
    expected = []
    for epoch in range(len(used) // length + 1):
        undisturbed.set_epoch(epoch)
        expected += list(undisturbed)
    assert used == expected[: len(used)]
    assert len(used) >= length


epoch_arguments = {
    "length": st.integers(1, 30),
    "seed": st.integers(0, 2**64),
    "tail": st.sampled_from(["uneven", "mask"]),
    "naming": st.booleans(),
    "count": st.integers(1, 7),
    "history": steps_of_history,
}


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:epoch .* is over and set_epoch was not called")
@STEADY
@given(**epoch_arguments)
def test_any_history_goes_through_the_epochs_in_order(**example):
    check_epochs(**example)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:epoch .* is over and set_epoch was not called")
@LONG
@given(**epoch_arguments)
def test_any_history_goes_through_the_epochs_in_order_long(**example):
    check_epochs(**example)


slot_history = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 4)),
        st.tuples(st.just("regroup"), st.integers(1, 5)),
        st.tuples(st.just("restore"), st.integers(1, 5)),
    ),
    max_size=12,
)


class Workers:
    """Workers that carry all slots between them, read ahead as loaders do, and commit in step."""

    def __init__(self, make, num_workers):
        self.make = make
        self.used: list[list[int]] = []
        self.start(num_workers)

    def start(self, num_workers, state=None):
        self.samplers = [self.make() for _ in range(num_workers)]
        for rank, sampler in enumerate(self.samplers):
            sampler.resize(num_workers, rank)
            if state is not None:
                sampler.load_state_dict(state)
        self.iterators = [iter(sampler) for sampler in self.samplers]

    def read(self):
        """One step's batch of every slot; a slot without samples in an uneven last step has none."""
        step, batches = self.samplers[0].step, []
        for sampler, iterator in zip(self.samplers, self.iterators, strict=True):
            for slot in sampler.slots:
                wanted = sampler.indices(step, slot)
                batches.append(next(iterator) if wanted else [])
                assert batches[-1] == wanted, "an iteration gives what indices() gives"
        return batches

    def train(self):
        sampler = self.samplers[0]
        batches, step = self.read(), sampler.step
        for each in self.samplers:
            each.commit(step)
        self.used += batches
        if step + 1 == sampler.end_of_epoch(step):
            for iterator in self.iterators:
                assert next(iterator, None) is None, "an iteration ends with its epoch"
            self.iterators = [iter(each) for each in self.samplers]

    def abort(self, ahead):
        """Read the step, and perhaps more, and throw everything away."""
        self.read()
        for iterator in self.iterators:
            for _ in range(ahead):
                next(iterator, None)
        self.iterators = [iter(each) for each in self.samplers]

    def state(self):
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]

    def regroup(self, num_workers):
        if num_workers > len(self.samplers):
            self.start(num_workers, self.state())
            return
        self.samplers = self.samplers[:num_workers]
        for rank, sampler in enumerate(self.samplers):
            sampler.resize(num_workers, rank)
        self.iterators = [iter(sampler) for sampler in self.samplers]


def check_slots(length, seed, shuffle, tail, num_slots, slot_batch_size, num_workers, history):
    def make():
        return ElasticBatchSampler(
            range(length), num_slots, slot_batch_size, slots=[], seed=seed, shuffle=shuffle, tail=tail
        )

    if tail == "drop" and num_slots * slot_batch_size > length:
        with pytest.raises(ValueError, match="drops all"):
            make()
        return
    run, reference = Workers(make, num_workers), make()
    for action, *numbers in history:
        if action == "train":
            for _ in range(numbers[0]):
                run.train()
        elif action == "restore":
            run.start(numbers[0], run.state())
        else:
            getattr(run, action)(numbers[0])
    while run.samplers[0].epoch < 2:
        run.train()
    steps = run.samplers[0].step
    assert run.used == [reference.indices(step, slot) for step in range(steps) for slot in range(num_slots)]
    per_epoch = num_slots * reference.steps_per_epoch
    for epoch in range(2):
        flat = [index for batch in run.used[epoch * per_epoch : (epoch + 1) * per_epoch] for index in batch]
        undisturbed = ElasticDistributedSampler(range(length), 1, 0, seed=seed, shuffle=shuffle)
        undisturbed.set_epoch(epoch)
        expected = list(undisturbed)
        if tail == "drop":
            assert flat == expected[: length - length % (num_slots * slot_batch_size)]
        elif tail == "mask":
            assert [index for index in flat if weight_of(index)] == expected
        else:
            assert flat[:length] == expected
            assert tail == "pad" or len(flat) == length


slot_arguments = {
    "length": st.integers(1, 60),
    "seed": st.integers(0, 2**64),
    "shuffle": SHUFFLES,
    "tail": st.sampled_from(TAILS),
    "num_slots": st.integers(1, 6),
    "slot_batch_size": st.integers(1, 5),
    "num_workers": st.integers(1, 5),
    "history": slot_history,
}


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:step .* is issued again")  # that is what an abort is for
@STEADY
@given(**slot_arguments)
def test_any_history_of_workers_commits_every_epoch_once_in_order(**example):
    check_slots(**example)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:step .* is issued again")
@LONG
@given(**slot_arguments)
def test_any_history_of_workers_commits_every_epoch_once_in_order_long(**example):
    check_slots(**example)
