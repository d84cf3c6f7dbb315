"""ElasticDistributedSampler over time: states, resizes, and epochs that are named or forgotten."""

from __future__ import annotations

import json
import warnings

import pytest

from phalanx.data import ElasticDistributedSampler

pytestmark = pytest.mark.fast


def sampler_of(length, num_replicas=1, rank=0, start_index=0, **options):
    return ElasticDistributedSampler(range(length), num_replicas, rank, start_index, **options)


def test_shrinking_in_the_middle_repeats_and_loses_nothing():
    """The case of torch's sampler: 10,000 samples, half used on 4 ranks, resumed on 3."""
    used = []
    before = [sampler_of(10_000, 4, rank) for rank in range(4)]
    for iterators in [[iter(s) for s in before]]:
        for _ in range(1250):
            used.extend(next(it) for it in iterators)
    state = json.loads(json.dumps(before[2].state_dict()))
    after = [sampler_of(10_000, 3, rank, tail="uneven") for rank in range(3)]
    for sampler in after:
        sampler.load_state_dict(state)
        used.extend(sampler)
    assert sorted(used) == list(range(10_000))


def test_state_is_json_and_the_same_on_all_ranks_and_world_sizes():
    states = []
    for count in (1, 2, 4):
        for sampler in [sampler_of(100, count, rank, seed=7) for rank in range(count)]:
            sampler.set_epoch(3)
            iterator = iter(sampler)
            for _ in range(40 // count):
                next(iterator)
            states.append(sampler.state_dict())
    expected = {
        "version": 1,
        "seed": 7,
        "epoch": 3,
        "position": 40,
        "length": 100,
        "order": "shuffled(sequential)",
    }
    assert states == [expected] * 7
    assert json.loads(json.dumps(expected)) == expected


def test_consumed_says_what_a_prefetching_loader_really_used():
    sampler = sampler_of(100, 4, 0)
    iterator = iter(sampler)
    for _ in range(10):
        next(iterator)
    assert sampler.state_dict(consumed=3)["position"] == 12
    assert sampler.state_dict()["position"] == 40
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match=rf"consumed is {wrong} on rank 0"):
            sampler.state_dict(consumed=wrong)


def test_resize_goes_on_in_the_middle_of_an_iteration():
    whole = list(sampler_of(50))
    sampler = sampler_of(50, 4, 0)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(3)] == whole[0:12:4]
    sampler.resize(2, 1)
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, 1, 19)
    assert [next(iterator) for _ in range(2)] == whole[13:17:2]
    sampler.resize(1, 0)
    assert list(iterator) == whole[16:]


def test_resize_that_gives_samples_back_closes_old_iterators():
    whole = list(sampler_of(50))
    sampler = sampler_of(50, 2, 0)
    iterator = iter(sampler)
    for _ in range(10):
        next(iterator)
    sampler.resize(3, 2, consumed=4)
    with pytest.raises(RuntimeError, match="out of date: samples were given back"):
        next(iterator)
    assert list(sampler) == [whole[position % 50] for position in range(10, 52, 3)]


def test_a_refused_resize_changes_nothing():
    sampler = sampler_of(10, 2, 0, shuffle=False)
    iterator = iter(sampler)
    assert next(iterator) == 0
    with pytest.raises(ValueError, match="rank is 3"):
        sampler.resize(3, 3)
    assert list(iterator) == [2, 4, 6, 8]


def test_loading_closes_old_iterators():
    sampler = sampler_of(10)
    iterator = iter(sampler)
    next(iterator)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="out of date: a state was loaded"):
        next(iterator)
    assert len(list(sampler)) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "dataset of length 11, but this dataset's length is 10"),
        ({"version": 2}, "version 2; this Phalanx reads version 1"),
        ({"version": None}, "version None"),
        ({"order": "sequential"}, "order 'sequential', but this sampler's is 'shuffled"),
        ({"position": 11}, r"position 11; expected one in \[0, 10\]"),
        ({"position": -1}, "position -1"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": "3"}, "epoch='3'; expected an integer"),
        ({"seed": True}, "seed=True; expected an integer"),
        ({"position": 2.0}, "position=2.0"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message):
    sampler = sampler_of(10)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_start_index_counts_samples_that_are_done_and_holds_for_the_first_epoch():
    whole = sampler_of(20)
    whole.set_epoch(5)
    order = list(whole)
    sampler = sampler_of(20, 2, 1, 10)
    sampler.set_epoch(5)
    assert list(sampler) == order[11::2]
    sampler.set_epoch(6)
    assert len(list(sampler)) == 10


def test_a_forgotten_set_epoch_advances_with_one_warning():
    forgetful, careful = (sampler_of(30) for _ in range(2))
    expected = []
    for epoch in range(4):
        careful.set_epoch(epoch)
        expected.append(list(careful))
    got = [list(forgetful)]
    with pytest.warns(UserWarning, match="set_epoch was not called: going on with epoch 1"):
        got.append(list(forgetful))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got += [list(forgetful), list(forgetful)]
    assert got == expected
    assert forgetful.epoch == 3


def test_without_shuffle_nothing_is_forgotten_and_nobody_is_warned():
    sampler = sampler_of(3, 1, 0, shuffle=False)
    assert [list(sampler) for _ in range(3)] == [[0, 1, 2]] * 3


def test_an_iteration_broken_off_begins_again():
    sampler = sampler_of(30)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(5)]
    assert list(sampler)[:5] == first


def test_naming_the_epoch_that_is_over_runs_it_again():
    sampler = sampler_of(30)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_usual_loop_over_epochs_goes_on_where_a_state_was_saved():
    def run(sampler, first_epoch, seen, stop_after=None):
        for epoch in range(first_epoch, 3):
            sampler.set_epoch(epoch)
            for index in sampler:
                seen.append((epoch, index))
                if len(seen) == stop_after:
                    return sampler.state_dict()
        return sampler.state_dict()

    undisturbed = []
    run(sampler_of(7), 0, undisturbed)
    for stop_after in range(1, 21):
        seen = []
        state = run(sampler_of(7), 0, seen, stop_after)
        resumed = sampler_of(7)
        resumed.load_state_dict(state)
        run(resumed, state["epoch"], seen)
        assert seen == undisturbed, stop_after


def test_a_state_of_the_end_of_an_epoch_leads_to_the_next():
    sampler = sampler_of(7)
    list(sampler)
    resumed = sampler_of(7)
    resumed.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert list(resumed) == list(sampler)
    assert resumed.epoch == 1


def test_a_replica_that_ends_early_agrees_with_the_others_on_the_end():
    samplers = [sampler_of(5, 3, rank, tail="uneven") for rank in range(3)]
    for sampler in samplers:
        list(sampler)
    assert [s.state_dict()["position"] for s in samplers] == [5, 5, 5]


def test_setting_the_epoch_leaves_a_running_iteration_alone():
    sampler = sampler_of(9, 1, 0, shuffle=False)
    iterator = iter(sampler)
    next(iterator)
    sampler.epoch = 4
    assert list(iterator) == list(range(1, 9))
    assert sampler.epoch == 4
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.set_epoch(-1)


def test_a_replica_without_a_share_of_the_rest_waits_for_the_others():
    samplers = [sampler_of(5, 3, rank, tail="uneven") for rank in range(3)]
    for sampler in samplers:
        sampler.load_state_dict({**sampler.state_dict(), "position": 3})
    assert [len(list(sampler)) for sampler in samplers] == [1, 1, 0]
    assert [sampler.epoch for sampler in samplers] == [0, 0, 0]
    with pytest.warns(UserWarning, match="going on with epoch 1"):
        assert sorted(index for sampler in samplers for index in sampler) == list(range(5))
    assert [sampler.epoch for sampler in samplers] == [1, 1, 1]


def test_a_resize_before_the_first_iteration_keeps_the_start():
    sampler = sampler_of(20, 2, 1, 10)
    sampler.resize(1, 0)
    sampler.set_epoch(3)
    assert (len(sampler), sampler.epoch) == (10, 3)
    assert len(list(sampler)) == 10


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "mask"])
def test_a_resize_at_the_very_end_of_an_epoch_does_not_run_it_again(tail):
    sampler = sampler_of(8, 4, 0, tail=tail)
    iterator = iter(sampler)
    assert len([next(iterator), next(iterator)]) == 2
    sampler.resize(1, 0)
    sampler.set_epoch(0)  # the training loop is entered again
    assert list(iterator) == list(sampler) == []
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(8))
