"""Every event survives its line of JSON; the log tolerates torn lines and full disks."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.events import _event_types as types
from phalanx.events import _lines, _writer
from phalanx.launch import events
from phalanx.launch.events import EventLog, from_json, read_events, to_json

pytestmark = pytest.mark.fast

EVENTS: list[events.AnyEvent] = [
    events.GenerationFormed(job="j", generation=2, num_nodes=3, num_workers=24, seconds=0.2),
    events.GenerationEnded(job="j", generation=2, how="broken", reason="worker died"),
    events.WorkerStarted(job="j", worker_id="w", rank=4, local_rank=1, pid=77),
    events.WorkerExited(job="j", worker_id="w", rank=4, local_rank=1, pid=77, exit_code=-9),
    events.WorkerFailed(
        job="j", worker_id="w", rank=4, local_rank=1, pid=77, exit_code=1, cause="KeyError", message="x", stderr=("a",)
    ),
    events.NodeLoad(job="j", node="n", cpu=0.5, memory_used=1, memory_total=2, received=3.0, sent=4.0),
    events.ActionAsked(job="j", action="scale", detail="to 4", by="somebody"),
    events.WorkerReplaced(job="j", old_worker_id="w", worker_id="x", rank=4),
    events.JobRestarted(job="j", restart_count=1, max_restarts=3, reason="w died"),
    events.WorkerHung(job="j", worker_id="w", rank=4, seconds=30.5),
    events.JobWentBack(job="j", from_step=57, to_step=50, count=1),
    events.LimitReached(job="j", limit="node", reason="node n is left out", nodes=("n",)),
    events.NodeNoticed(job="j", source="aws", reason="AWS will stop this instance", seconds=119.5),
    types.GoodputTold(
        job="j",
        goodput=0.9,
        worker_seconds=50.0,
        parts={"productive": 45.0, "save": 5.0},
        failures=1,
        seconds=25.0,
        text="goodput 90.0%",
        mtbf_seconds=25.0,
    ),
    types.AgentEventsLost(job="j", lines=3),
    events.ShutDown(job="j", reason="SIGTERM", succeeded=False),
    types.TrainingStarted(worker="w", pid=7),
    types.RoundFormed(
        worker="w",
        generation=1,
        round=2,
        workers=("w", "x"),
        joined=("x",),
        left=(),
        step=5,
        seconds=0.1,
        rank=0,
        machine={"threads": 1},
    ),
    types.StepCommitted(worker="w", step=4, epoch=0, loss=None, samples=32, generation=1, round=0, world_size=2),
    types.WorkerStepTimes(worker="w", step=4, compute=(5, 6), wait=(1, 2), data=(0, 0), save=(7, 0)),
    types.GroupLost(worker="w", generation=1, step=5, reason="closed"),
    types.StateSent(worker="w", to="x", bytes=100),
    types.CellsMoved(worker="w", step=3, cells=2, bytes=100, left=1),
    types.CellsHeld(worker="w", step=3, cells=9, owned=5, unprotected=2, mirrors=("x", "y"), copies=2, bytes=90),
    types.StateReceived(worker="x", step=5, source="w"),
    types.RankTakenOver(worker="x", step=9, rank=1, generation=2),
    types.StepsRepeated(worker="w", step=0, before=5),
    types.NonFiniteFound(worker="w", step=3, reaction="stop", epoch=0, loss="nan", grads=("a",), slots={"1": [4, 5]}),
    types.StepSkipped(worker="w", step=3, epoch=0, reason="the loss is nan", in_row=1),
    types.RolledBack(worker="w", step=57, to=40, reason="the loss is 9"),
    types.Resumed(worker="w", step=3),
    types.Saved(worker="w", step=3, path="/saves/3"),
    types.SaveFailed(worker="w", step=3, error="full", next_attempt_in=2.0),
    types.SaveUnreadable(worker="w", problem="torn"),
    types.DirectoryShared(worker="w", directory="/saves", owner="job b"),
    types.TrainingLeft(worker="w", step=3),
    types.NotNeeded(worker="w", step=9),
    types.TrainingFinished(worker="w", step=9),
    types.EventsLost(worker="w", lines=4),
    types.SlotsDealt(worker="w", step=8, generation=1, workers=("a", "b"), sizes=(3, 1), pace=(0.1, 0.3), gain=1.5),
    types.WrongBitsFound(
        worker="w", step=8, what="slot", culprit="b", slot=2, parameter="p", element=4, values=("1", "2")
    ),
    types.WeightsCompared(worker="w", step=8, digest="ab", workers=4),
    events.Event(name="custom", source=events.EventSource.WORKER, metadata={"x": 1, "y": None}),
]


def test_every_type_is_covered_here() -> None:
    assert {event.kind for event in EVENTS} == set(events.EVENT_TYPES)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_events_survive_json_and_get_time_and_host(event: events.AnyEvent) -> None:
    line = to_json(event, now=12.5)
    back = from_json(line)
    assert type(back) is type(event)
    record = json.loads(line)
    assert 12.5 in (record.get("time"), record.get("timestamp"))
    if isinstance(back, events.JobEvent):
        assert back.host
    assert json.loads(to_json(back)) == record


@given(
    st.builds(
        types.StepCommitted,
        step=st.integers(0, 2**62),
        epoch=st.integers(0, 99),
        loss=st.none() | st.floats() | st.integers(),
        samples=st.integers(0, 99),
        generation=st.integers(-1, 99),
        round=st.integers(0, 99),
        world_size=st.none() | st.integers(1, 99),
        time=st.sampled_from([0.0, 7.5]),
        worker=st.sampled_from(["", "other"]),
    ),
    st.text(),
)
def test_the_quick_line_of_a_step_is_the_plain_one(event: types.StepCommitted, worker: str) -> None:
    plain = _lines.dump(_lines.to_record(event, now=12.25, worker=worker))
    assert _lines.step_line(event, json.dumps(worker), 12.25) == plain


_strange = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from([2**63, -(2**63), [], {}]),
)


@given(
    st.fixed_dictionaries(
        {"event": st.just("step")},
        optional={
            "time": st.floats() | _strange,
            "worker": st.text(max_size=3) | _strange,
            **{name: st.integers(-1, 9) | _strange for name in ("step", "epoch", "samples", "generation", "round")},
            "loss": st.floats() | _strange,
            "world_size": st.integers(-1, 9) | _strange,
            "unknown": _strange,
        },
    )
)
@settings(max_examples=500)
def test_the_quick_way_to_read_a_step_is_the_careful_one(record: dict[str, Any]) -> None:
    def read() -> str:
        try:
            return repr(_lines.from_record(record))
        except ValueError as error:
            return f"refused: {error}"

    quick = read()
    with mock.patch.object(_lines, "_usual_step", return_value=None):
        assert read() == quick


def test_the_quick_way_takes_the_usual_line() -> None:
    event = types.StepCommitted(step=3, epoch=0, loss=0.5, samples=8, generation=0, round=0, world_size=2)
    record = json.loads(_lines.step_line(event, '"w"', 12.25))
    assert _lines._usual_step(record) == dataclasses.replace(event, time=12.25, worker="w")


def test_the_log_is_appended_by_several_writers_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    first, second = EventLog(path), EventLog(path)
    for index, event in enumerate(EVENTS):
        (first if index % 2 else second).write(event)
    first.close()
    second.close()
    assert [event.kind for event in read_events(path)] == [event.kind for event in EVENTS]


def test_a_torn_or_foreign_line_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    good = to_json(EVENTS[0])
    path.write_text(f'{good[:20]}\n{good}\n{{"v":9,"kind":"later"}}\n[]\n')
    with caplog.at_level(logging.WARNING):
        assert len(list(read_events(path))) == 1
    said = [record.getMessage() for record in caplog.records if record.name == _lines.__name__]
    assert [text.partition(": ")[0][-6:] for text in said] == ["line 1", "line 3", "line 4"]


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        log.write(EVENTS[0])
        log.write(EVENTS[0])
    assert len([record for record in caplog.records if record.name == _writer.__name__]) == 1


def test_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    end = next(event for event in EVENTS if isinstance(event, events.ShutDown))
    EventLog(None, events.get_event_handler("console")).write(end)
    assert json.loads(capsys.readouterr().err)["reason"] == "SIGTERM"
    assert events.get_event_handler("null") is None
    with pytest.raises(ValueError, match=r"there are \['console', 'dynamic_rendezvous', 'null'\]"):
        events.get_event_handler("kafka")
