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
from phalanx.elastic.reduce._waves import better_waves, even_waves, relieved_waves, span
from phalanx.elastic.tools._step_clock import COMPUTE, WAIT, StepClock
from phalanx.events._writer import EventLog

SECONDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)


@pytest.mark.fast
@given(num_slots=st.integers(1, 60), seconds=SECONDS)
def test_every_slot_has_one_wave_and_everybody_is_in_the_first(num_slots, seconds):
    size = len(seconds)
    plan = better_waves(even_waves(num_slots, size), seconds) or even_waves(num_slots, size)
    assert len(plan.owners) == num_slots
    assert sorted(slot for rank in range(size) for slot in plan.slots_of(rank)) == list(range(num_slots))
    assert plan.waves[0] == tuple(range(min(size, num_slots)))
    assert all(list(wave) == sorted(set(wave)) for wave in plan.waves)
    assert [len(plan.slots_of(rank)) for rank in range(size)] == list(plan.sizes(size))
    assert plan.owners[0] == 0, "slot 0's buffers are rank 0's"


@pytest.mark.fast
@given(num_slots=st.integers(1, 60), seconds=SECONDS)
def test_a_change_pays_and_is_left_alone_then(num_slots, seconds):
    even = even_waves(num_slots, len(seconds))
    found = better_waves(even, seconds)
    if found is not None:
        assert span(found, seconds) <= (1 - MIN_GAIN) * span(even, seconds)
        assert better_waves(found, seconds) is None
        assert better_waves(found, [1.0] * len(seconds)) in (None, even), "who recovers gets its slots back"
    assert better_waves(even, [1.0] * len(seconds)) is None, "nobody is slow"


@pytest.mark.fast
def test_two_slow_workers_are_relieved_together():
    assert better_waves(even_waves(40, 4), [1.0, 3.0, 1.0, 3.0]) == relieved_waves(40, 4, {1, 3})
    assert better_waves(even_waves(3, 4), [1.0, 9.0, 1.0, 1.0]) is None, "fewer slots than workers"


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


def slowed(group, slow, directory, *, num_steps=WINDOW + 3, **options):
    """Train while slots of one worker are measured to take three times as long; who computed what in each step."""
    run = RunOptions(progress=False, group=group, log_dir=directory, verify=True, threads=1, **options)
    job = sharded_training.make_job(sharded=group is not None, copies=2, run=run)
    job.clock.end_slot = lambda: (0.3 if job.rank == slow else 0.1, 0.0)
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
