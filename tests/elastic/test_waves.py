"""A slow worker of a sharded job skips waves: pure properties of a plan, and a job whose bits stay."""

from __future__ import annotations

import pytest
import sharded_training
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import RunOptions
from phalanx.elastic._dealing import WINDOW
from phalanx.elastic.reduce._deal import MIN_GAIN
from phalanx.elastic.reduce._waves import better_waves, even_waves, expected, relieved_waves, span, wave_cost
from phalanx.elastic.tools._step_clock import COMPUTE, WAIT, StepClock
from phalanx.events._writer import EventLog

SECONDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)
COSTS = st.dictionaries(st.booleans(), st.floats(0.0, 10.0))


@pytest.mark.fast
@given(num_slots=st.integers(1, 60), seconds=SECONDS, costs=COSTS)
def test_every_slot_has_one_wave_and_everybody_is_in_the_first(num_slots, seconds, costs):
    size = len(seconds)
    plan = better_waves(even_waves(num_slots, size), seconds, costs) or even_waves(num_slots, size)
    assert len(plan.owners) == num_slots
    assert sorted(slot for rank in range(size) for slot in plan.slots_of(rank)) == list(range(num_slots))
    assert plan.waves[0] == tuple(range(min(size, num_slots)))
    assert all(list(wave) == sorted(set(wave)) for wave in plan.waves)
    assert [len(plan.slots_of(rank)) for rank in range(size)] == list(plan.sizes(size))
    assert plan.owners[0] == 0, "slot 0's buffers are rank 0's"


@pytest.mark.fast
@given(num_slots=st.integers(1, 60), seconds=SECONDS, costs=COSTS)
def test_a_change_pays_and_is_left_alone_then(num_slots, seconds, costs):
    even, nobody_slow = even_waves(num_slots, len(seconds)), [1.0] * len(seconds)
    found = better_waves(even, seconds, costs)
    if found is not None:
        assert expected(found, seconds, costs) <= (1 - MIN_GAIN) * expected(even, seconds, costs)
        assert better_waves(found, seconds, costs) is None
        if False not in costs or costs[False] >= costs.get(True, 0.0):
            again = better_waves(found, nobody_slow, costs)
            assert again == even or (again is None and len(found.waves) == len(even.waves)), "who recovers gets slots"
    if False not in costs or costs[False] >= costs.get(True, 0.0):
        assert better_waves(even, nobody_slow, costs) is None, "nobody is slow"


@pytest.mark.fast
@given(
    num_slots=st.integers(2, 60), seconds=SECONDS, costs=COSTS, slow=st.sets(st.integers(0, 8)), whole=st.floats(0, 600)
)
def test_no_change_is_for_the_worse_and_what_was_measured_is_what_is_expected(num_slots, seconds, costs, slow, whole):
    size = len(seconds)
    some = {rank for rank in slow if rank < size - 1}
    plan = relieved_waves(num_slots, size, some) if num_slots > size else even_waves(num_slots, size)
    found = better_waves(plan, seconds, costs)
    if found is not None:
        assert expected(found, seconds, costs) <= expected(plan, seconds, costs)
    measured = expected(plan, seconds, {plan.is_even: wave_cost(plan, seconds, whole)})
    assert measured == pytest.approx(max(whole, span(plan, seconds)))


@pytest.mark.fast
def test_waves_that_cost_more_than_slots_gain_are_not_made_and_those_that_turned_out_to_are_unmade():
    """The figures of four workers of which one takes twice as long, in seconds: eight waves, or eleven."""
    even, seconds = even_waves(32, 4), [0.01, 0.01, 0.01, 0.02]
    skipping = relieved_waves(32, 4, {3})
    costs = {True: wave_cost(even, seconds, 0.207)}
    assert better_waves(even, seconds, costs) is None, "a wave more costs what a slot takes"
    assert better_waves(even, seconds, {True: 0.001}) == skipping
    costs[False] = wave_cost(skipping, seconds, 0.225)
    assert better_waves(skipping, seconds, costs) == even, "0.207 s is less than 0.225 s"
    slots_of_40_ms = [4 * one for one in seconds]
    assert better_waves(even, slots_of_40_ms, costs) == skipping


@pytest.mark.fast
def test_two_slow_workers_are_relieved_together():
    assert better_waves(even_waves(40, 4), [1.0, 3.0, 1.0, 3.0], {}) == relieved_waves(40, 4, {1, 3})
    assert better_waves(even_waves(3, 4), [1.0, 9.0, 1.0, 1.0], {}) is None, "fewer slots than workers"


@pytest.mark.fast
def test_waiting_is_told_from_computing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("phalanx.elastic.tools._step_clock.time.perf_counter", lambda: now[0])
    clock = StepClock(EventLog(None))
    clock.begin()
    for seconds, is_waiting in ((1.0, True), (10.0, True), (20.0, False), (2.0, True), (30.0, False), (3.0, False)):
        now[0] += seconds
        clock.turn(is_waiting)
    assert clock._laps[COMPUTE] == 6.0
    assert clock._laps[WAIT] == 60.0


def slowed(group, slow, directory, *, num_steps=WINDOW + 3, waves=lambda job: 0.0, **options):
    """Train while slots of one worker are measured to take three times as long, and all waves of a step ``waves(job)``;
    who computed what in each step."""
    run = RunOptions(progress=False, group=group, log_dir=directory, verify=True, threads=1, **options)
    job = sharded_training.make_job(sharded=group is not None, copies=2, run=run)
    job.clock.end_slot = lambda: (0.3 if job.rank == slow else 0.1, 0.0)
    job.clock.since_begin = lambda: waves(job)
    slots = []
    for step in job.steps(max_steps=num_steps):
        mine = []
        for micro in step:
            mine.append(micro.slot)
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        if step.commit(max_grad_norm=0.5):
            job.count.update(job.model)
        slots.append(mine)
    return slots, sharded_training.weights(job)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_worker_skips_waves_and_the_bits_stay(tmp_path, slow):
    # An epoch has 5 steps, of which the last is not full: it does not count.
    num_steps = WINDOW + 4
    _, expected = slowed(None, -1, tmp_path / "one", num_steps=num_steps)
    results = simulate(3).run(slowed, slow, tmp_path / "three", num_steps=num_steps)
    assert {weights for _, weights in results} == {expected}
    others = [rank for rank in range(3) if rank != slow]
    for rank, (slots, _) in enumerate(results):
        assert slots[0] == list(range(rank, 8, 3))
        assert slots[-2] == ([slow] if rank == slow else [rank, 3 + others.index(rank), 5 + others.index(rank)]) + (
            [7] if rank == others[0] else []
        )
    lines = [line for path in (tmp_path / "three").glob("events-*") for line in read_lines(path)]
    (event,) = [line for line in lines if line["event"] == "slots_dealt"]
    assert event["sizes"] == [{slow: 1, others[0]: 4, others[1]: 3}[rank] for rank in range(3)]
    assert event["gain"] == 1.5, "three waves of 0.3 s; then one of them and three of 0.1 s"


def test_waves_stay_even_when_it_is_switched_off(tmp_path):
    for rank, (slots, _) in enumerate(simulate(3).run(slowed, 1, tmp_path, num_steps=WINDOW + 4, balance=False)):
        assert slots[-2] == list(range(rank, 8, 3))


def test_waves_stay_even_where_more_of_them_would_cost_more_than_they_gain(tmp_path):
    """Three waves of 0.3 s took 2.4 s: each costs 0.5 s beside its slots, and four waves would take longer."""
    for rank, (slots, _) in enumerate(
        simulate(3).run(slowed, 1, tmp_path, num_steps=WINDOW + 4, waves=lambda job: 2.4)
    ):
        assert slots[-2] == list(range(rank, 8, 3))
    assert not [line for path in tmp_path.glob("events-*") for line in read_lines(path) if "slots_dealt" in str(line)]


def test_waves_that_take_longer_than_they_promised_are_even_again_and_stay_so(tmp_path):
    """What it cost is remembered: after the next 32 full steps they are not tried again."""

    def waves(job):
        return 1.0 if job.sharding.waves.is_even else 2.0

    _, expected_weights = slowed(None, -1, tmp_path / "one", num_steps=74)
    results = simulate(3).run(slowed, 1, tmp_path / "three", num_steps=74, waves=waves)
    assert {weights for _, weights in results} == {expected_weights}
    lines = [line for path in (tmp_path / "three").glob("events-*") for line in read_lines(path)]
    dealt = [line for line in lines if line["event"] == "slots_dealt"]
    assert [event["sizes"] for event in dealt] == [[4, 1, 3], [3, 3, 2]]
    assert [event["step"] for event in dealt] == [9, 29], "after a window of full steps, and after two"
    assert dealt[1]["gain"] == 2.0
    for rank, (slots, _) in enumerate(results):
        assert slots[-2] == list(range(rank, 8, 3))
