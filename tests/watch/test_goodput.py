"""Every worker-second is accounted for, exactly, whatever the events say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.events import _event_types as types
from phalanx.events._event_types import AnyEvent
from phalanx.watch import PARTS, goodput
from phalanx.watch._goodput import Accounts

pytestmark = pytest.mark.fast

AGENT = {"job": "j", "rank": 0, "local_rank": 0, "pid": 1}


def formed(worker: str, time: float, workers: tuple[str, ...], **more: object) -> types.RoundFormed:
    values: dict[str, object] = {"generation": 0, "round": 0, "joined": (), "left": (), "step": 0, "seconds": 0.0}
    return types.RoundFormed(worker=worker, time=time, workers=workers, **(values | more))  # type: ignore[arg-type]


def scripted() -> list[AnyEvent]:
    """Two workers for 20 s each; b dies, c takes its place, and then d comes that nobody needs."""
    both = ("a", "b")
    events: list[AnyEvent] = []
    for worker in both:
        events += [
            types.WorkerStarted(worker_id=worker, time=100.0, **AGENT),
            types.TrainingStarted(worker=worker, time=102.0, pid=1),
            formed(worker, 103.0, both, seconds=1.0, state_seconds=0.25, joined=both),
        ]
    # Four steps of 1 s: a waits 0.5 s longer for each than b, b waits for data for 0.1 s in each.
    events += [
        types.WorkerStepTimes(
            worker="a", time=107.0, step=0, compute=(400_000,) * 4, wait=(600_000,) * 4, data=(0,) * 4
        ),
        types.WorkerStepTimes(
            worker="b", time=107.0, step=0, compute=(800_000,) * 4, wait=(100_000,) * 4, data=(100_000,) * 4
        ),
        types.StepCommitted(worker="a", time=107.0, step=3, epoch=0, loss=1.0, samples=8, generation=0, round=0),
        types.WorkerExited(worker_id="b", time=108.0, exit_code=-9, **AGENT),
        types.WorkerFailed(worker_id="b", time=108.0, exit_code=-9, cause="SIGKILL", **AGENT),
        # Of the 1 s since the last commit, a computed 0.4 s and waited 0.6 s.
        types.GroupLost(worker="a", time=108.0, generation=0, step=4, reason="b is gone", dropped=0.4, waited=0.6),
        formed("a", 108.5, ("a",), generation=1, seconds=0.5, left=("b",), state_seconds=0.0, step=4),
        types.StepCommitted(worker="a", time=109.0, step=4, epoch=0, loss=1.0, samples=8, generation=1, round=0),
        types.WorkerStarted(worker_id="c", time=108.5, **AGENT),
        types.TrainingStarted(worker="c", time=109.0, pid=2),
        formed("a", 110.0, ("a", "c"), generation=1, round=1, seconds=0.1, state_seconds=0.1, joined=("c",)),
        formed("c", 110.0, ("a", "c"), generation=1, round=1, seconds=0.5, state_seconds=0.1, joined=("a", "c")),
        types.WorkerStepTimes(
            worker="a", time=112.0, step=6, compute=(500_000,), wait=(0,), data=(0,), save=(250_000,)
        ),
    ]
    for worker in ("a", "c"):
        events += [
            types.TrainingFinished(worker=worker, time=112.0, step=8),
            types.WorkerExited(worker_id=worker, time=112.5, exit_code=0, **AGENT),
        ]
    events += [
        types.WorkerStarted(worker_id="d", time=112.0, **AGENT),
        types.NotNeeded(worker="d", time=112.4, step=8),
        types.WorkerExited(worker_id="d", time=112.5, exit_code=0, **AGENT),
    ]
    return events


def test_a_job_with_scripted_faults_is_accounted_for_to_the_microsecond() -> None:
    account = goodput(scripted())
    lives = {"a": 12_500_000, "b": 8_000_000, "c": 4_000_000, "d": 500_000}
    assert account.total == sum(lives.values()) == sum(account.parts.values())
    expected = {
        "start": 2 * 2_000_000 + 500_000 + 500_000,  # c waited 0.5 s for its place, from 109.5 on
        "rendezvous": 2 * 750_000 + 400_000,
        "state_transfer": 2 * 250_000 + 100_000 + 100_000,
        "regroup": 500_000,
        "repeated": 400_000,
        "stragglers": 4 * 500_000 + 600_000,
        "data": 4 * 100_000,
        "save": 250_000,
        "surplus": 500_000,
        "hang": 0,
        "end": 2 * 500_000,
        "untold": 0,
    }
    productive = account.total - sum(expected.values())
    assert account.parts == {"productive": productive, **expected}
    assert account.num_failures == 1
    assert account.repair_seconds == (1.0,)
    assert str(account) == f"goodput {100 * productive / account.total:.1f}%, 1 failure, MTTR 1.0 s, MTBF 12.5 s"
    record = json.loads(json.dumps(account.to_record()))
    assert sum(record["parts"].values()) == pytest.approx(record["worker_seconds"])


def test_the_order_of_the_files_does_not_matter() -> None:
    assert goodput(reversed(scripted())) == goodput(scripted())


def test_waiting_for_one_that_hangs_is_not_waiting_for_a_straggler() -> None:
    both = ("a", "b")
    events: list[AnyEvent] = [formed(worker, 10.0, both) for worker in both]
    events += [
        types.WorkerHung(job="j", worker_id="b", rank=1, seconds=5.0, time=16.0),
        types.WorkerExited(worker_id="b", time=16.0, exit_code=-9, **AGENT),
        types.GroupLost(worker="a", time=16.0, generation=0, step=1, reason="b", dropped=0.5, waited=5.0),
    ]
    account = goodput(events)
    assert account.parts["hang"] == 10_000_000
    assert account.parts["stragglers"] == 0
    assert account.parts["repeated"] == 500_000


def test_steps_that_are_computed_again_after_a_total_loss_count_as_repeated() -> None:
    times = {"compute": (1_000_000,) * 4, "wait": (0,) * 4, "data": (0,) * 4}
    events: list[AnyEvent] = [
        formed("a", 10.0, ("a",)),
        types.WorkerStepTimes(worker="a", time=14.0, step=4, **times),
        types.StepsRepeated(worker="b", time=20.0, step=6, before=8),
        formed("b", 20.0, ("b",)),
        types.WorkerStepTimes(worker="b", time=24.0, step=6, **times),
    ]
    assert goodput(events).parts["repeated"] == 2_000_000  # steps 6 and 7, the second time


def test_a_worker_that_tells_nothing_is_not_called_productive() -> None:
    events: list[AnyEvent] = [
        types.WorkerStarted(worker_id="a", time=1.0, **AGENT),
        types.WorkerExited(worker_id="a", time=5.0, exit_code=0, **AGENT),
    ]
    account = goodput(events)
    assert account.parts["untold"] == account.total == 4_000_000
    assert account.share == 0.0


def test_of_a_job_that_runs_the_account_goes_on_to_now() -> None:
    events: list[AnyEvent] = [formed("a", 10.0, ("a",))]
    assert goodput(events).total == 0
    assert goodput(events, now=14.0).parts["productive"] == 4_000_000


moments = st.floats(0, 1e6, allow_nan=False) | st.sampled_from([1.0, 2.0, 3.0])
seconds = st.floats(-1, 100, allow_nan=False)
workers = st.sampled_from(["a", "b", "c"])
micros = st.lists(st.integers(0, 10**7), max_size=3).map(tuple)
groups = st.lists(workers, max_size=3).map(tuple)


def any_event() -> st.SearchStrategy[AnyEvent]:
    who, agents = {"worker": workers, "time": moments}, {"worker_id": workers, "time": moments}
    steps = st.integers(0, 20)
    process = {**agents, **{name: st.just(value) for name, value in AGENT.items()}}
    return st.one_of(
        st.builds(types.WorkerStarted, **process),
        st.builds(types.WorkerExited, exit_code=st.integers(-9, 1), **process),
        st.builds(types.WorkerFailed, exit_code=st.just(1), cause=st.sampled_from(["x", "lost contact"]), **process),
        st.builds(types.WorkerHung, job=st.just("j"), rank=st.just(0), seconds=seconds, **agents),
        st.builds(types.ShutDown, job=st.just("j"), reason=st.just(""), succeeded=st.booleans(), time=moments),
        st.builds(types.TrainingStarted, pid=st.just(1), **who),
        st.builds(
            types.RoundFormed,
            generation=st.just(0),
            round=st.just(0),
            workers=groups,
            joined=groups,
            left=groups,
            step=steps,
            seconds=seconds,
            state_seconds=seconds | st.none(),
            num_slots=st.integers(0, 2) | st.none(),
            **who,
        ),
        st.builds(types.WorkerStepTimes, step=steps, compute=micros, wait=micros, data=micros, save=micros, **who),
        st.builds(
            types.GroupLost,
            generation=st.just(0),
            step=steps,
            reason=st.just(""),
            dropped=seconds | st.none(),
            waited=seconds | st.none(),
            **who,
        ),
        st.builds(types.StepsRepeated, step=steps, before=steps, **who),
        st.builds(types.NotNeeded, step=steps, **who),
        st.builds(types.TrainingFinished, step=steps, **who),
        st.builds(types.TrainingLeft, step=steps, **who),
    )


@given(st.lists(any_event(), max_size=30), st.none() | moments)
def test_the_parts_add_up_to_the_lives_for_any_history(events: list[AnyEvent], now: float | None) -> None:
    account = goodput(events, now=now)
    assert sum(account.parts.values()) == account.total
    assert set(account.parts) == set(PARTS)
    assert all(isinstance(value, int) and value >= 0 for value in account.parts.values())
    assert 0 <= account.share <= 1
    in_arrival_order = Accounts()
    for event in events:  # a job that runs: files are read one after the other
        in_arrival_order.take(event)
    live = in_arrival_order.result(now=now)
    assert sum(live.parts.values()) == live.total
    assert in_arrival_order.result(now=now) == live  # looking changes nothing
    lives = in_arrival_order._lives.values()
    assert in_arrival_order.result().total == sum(life.last - life.first for life in lives)
