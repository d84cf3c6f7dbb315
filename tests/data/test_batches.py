"""ElasticBatchSampler: slots, steps, commits, tails, states."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, PaddingIndex
from phalanx.data._partition import Timeline

pytestmark = pytest.mark.fast


def sampler_of(length=23, num_slots=4, slot_batch_size=2, **options):
    return ElasticBatchSampler(range(length), num_slots, slot_batch_size, **{"slots": range(num_slots), **options})


def test_a_step_is_a_stretch_of_the_epoch_and_slots_are_its_parts():
    order = list(ElasticDistributedSampler(range(24), 1, 0, seed=3))
    sampler = sampler_of(24, seed=3)
    assert sampler.steps_per_epoch == 3
    for step in range(3):
        for slot in range(4):
            first = step * 8 + slot * 2
            assert sampler.indices(step, slot) == order[first : first + 2]


def test_indices_do_not_depend_on_what_was_done_before():
    fresh, used = sampler_of(), sampler_of(slots=[2])
    list(used)
    for step in range(5):
        used.commit(step)
    used.resize(2, 1)
    for step in (7, 0, 4, 2):
        for slot in range(4):
            assert used.indices(step, slot) == fresh.indices(step, slot)


def test_steps_run_on_through_epochs_with_new_orders():
    sampler = sampler_of(24)
    epochs = [
        [index for step in range(3 * e, 3 * e + 3) for slot in range(4) for index in sampler.indices(step, slot)]
        for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        ("pad", [[16, 17], [18, 19], [20, 0], [1, 2]]),
        ("mask", [[16, 17], [18, 19], [20, 0], [1, 2]]),
        ("uneven", [[16], [17], [18], [19, 20]]),
    ],
)
def test_the_short_last_step(tail, last):
    sampler = sampler_of(21, shuffle=False, tail=tail)
    assert sampler.steps_per_epoch == 3
    batches = [sampler.indices(2, slot) for slot in range(4)]
    assert batches == last
    padding = [index for batch in batches for index in batch if isinstance(index, PaddingIndex)]
    assert padding == ([0, 1, 2] if tail == "mask" else [])
    assert sampler.indices(3, 0) == [0, 1]


def test_drop_has_no_short_step():
    sampler = sampler_of(21, shuffle=False, tail="drop")
    assert sampler.steps_per_epoch == 2
    assert sampler.indices(2, 0) == [0, 1]


def test_slots_without_samples_in_the_last_uneven_step():
    sampler = sampler_of(9, shuffle=False, tail="uneven")
    assert [sampler.indices(1, slot) for slot in range(4)] == [[], [], [], [8]]
    assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert len(sampler) == 5


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "mask"])
@pytest.mark.parametrize("slots", [[], [0], [1, 3], range(4)])
def test_len_is_what_an_iteration_gives(tail, slots):
    sampler = sampler_of(19, tail=tail, slots=slots)
    for step in range(2 * sampler.steps_per_epoch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(list(sampler)) == len(sampler)
        sampler.commit(step)


def test_only_commits_move_the_position():
    sampler = sampler_of(24, slots=[1])
    first = list(sampler)
    with pytest.warns(UserWarning, match="no step has ever been committed"):
        assert list(sampler) == first
    assert list(sampler) == first
    sampler.commit(0)
    assert list(sampler) == first[1:]
    assert (sampler.step, sampler.epoch) == (1, 0)


def test_iteration_ends_with_the_epoch_and_the_next_begins_the_next():
    sampler = sampler_of(24, slots=[0])
    for epoch in range(3):
        batches = list(sampler)
        assert len(batches) == 3
        assert sampler.epoch == epoch
        for batch in batches:
            assert batch == sampler.indices(sampler.step, 0)
            sampler.commit(sampler.step)


@pytest.mark.parametrize("step", [0, 2, -1])
def test_commits_come_in_order(step):
    sampler = sampler_of()
    sampler.commit(0)
    with pytest.raises(ValueError, match=f"commit of step {step}, but the next step to commit is 1"):
        sampler.commit(step)


def test_state_is_json_and_resumes_at_any_number_of_workers():
    sampler = sampler_of(seed=9)
    for step in range(4):
        sampler.commit(step)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state == {
        "version": 1,
        "seed": 9,
        "epoch": 1,
        "position": 8,
        "length": 23,
        "order": "shuffled(sequential)",
        "step": 4,
    }
    for workers in (1, 2, 3, 4, 6):
        batches = {}
        for rank in range(workers):
            resumed = sampler_of(slots=[])
            resumed.resize(workers, rank)
            resumed.load_state_dict(state)
            batches.update({(resumed.slots[i % len(resumed.slots)], i): b for i, b in enumerate(resumed)})
        assert sorted(batches.values()) == sorted(sampler)


def test_a_state_goes_on_at_its_position_with_steps_of_another_size():
    sampler = sampler_of(30, shuffle=True)
    sampler.commit(0)
    order = list(ElasticDistributedSampler(range(30), 1, 0))
    resumed = sampler_of(30, num_slots=2, slot_batch_size=5, tail="uneven")
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.step, resumed.epoch) == (1, 0)
    assert [index for batch in resumed for index in batch] == order[8:]
    for step in (1, 2, 3):
        resumed.commit(step)
    assert (resumed.epoch, resumed.state_dict()["position"]) == (1, 0)
    with pytest.raises(ValueError, match="step 0 is before step 1, where this run was resumed"):
        resumed.indices(0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"length": 7}, "dataset of length 7"), ({"step": -1}, "step -1"), ({"step": None}, "step=None")],
)
def test_states_that_do_not_fit_are_refused(change, message):
    sampler = sampler_of()
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampler_of(num_slots=0), "num_slots is 0"),
        (lambda: sampler_of(slot_batch_size=0), "slot_batch_size 0"),
        (lambda: sampler_of(length=0), "empty"),
        (lambda: sampler_of(length=7, tail="drop"), "steps of 8 samples drops all 7"),
        (lambda: sampler_of(slots=[4]), r"slots are \(4,\)"),
        (lambda: sampler_of(slots=[1, 1]), r"slots are \(1, 1\)"),
        (lambda: sampler_of().indices(0, 4), "slot 4"),
        (lambda: sampler_of().indices(-1, 0), "step -1"),
        (lambda: sampler_of().resize(2, 2), "rank is 2"),
        (lambda: sampler_of().batches([(0, 0), (3, 0)]), r"epochs \[0, 1\]"),
    ],
)
def test_mistakes_are_value_errors_that_name_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_dataset_without_length_is_a_type_error():
    with pytest.raises(TypeError, match="has no length"):
        ElasticBatchSampler(object(), 1, 1, slots=[0])


def test_nothing_wanted_is_nothing_given():
    assert sampler_of().batches([]) == []


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    length=st.integers(1, 50),
    step_size=st.integers(1, 20),
    tail=st.sampled_from(["pad", "drop", "uneven", "mask"]),
    first_step=st.integers(0, 9),
    first_epoch=st.integers(0, 3),
    data=st.data(),
)
def test_timeline_is_the_walk_it_stands_for(length, step_size, tail, first_step, first_epoch, data):
    """Compare the closed form with walking step by step."""
    step_size = min(step_size, length) if tail == "drop" else step_size
    position = data.draw(st.integers(0, length))
    timeline = Timeline(
        length=length,
        step_size=step_size,
        tail=tail,
        first_step=first_step,
        first_epoch=first_epoch,
        first_position=position,
    )
    epoch = first_epoch
    for step in range(first_step, first_step + 40):
        while position + (step_size if tail == "drop" else 1) > length:
            epoch, position = epoch + 1, 0
        assert timeline.locate(step) == (epoch, position)
        position += step_size


def test_a_trillion_samples():
    class Endless:
        def __len__(self):
            return 10**12

    sampler = ElasticBatchSampler(Endless(), 64, 32, slots=[5])
    far = sampler.steps_per_epoch - 1
    batch = sampler.indices(far, 0)
    assert len(set(batch)) == 32
    assert np.all(np.array(batch) < 10**12)
