"""Slow workers, those that wait for their data and those that only wait for others are told apart."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from watching import story, told

from phalanx.events import _event_types as types
from phalanx.watch._paces import Paces, compare, in_words
from phalanx.watch._prometheus import exposition

pytestmark = pytest.mark.fast


def test_a_worker_whose_data_is_late_waits_for_data_and_is_not_slow() -> None:
    rows = compare({"a": (0.1, 0.0, 0.2), "b": (0.1, 0.19, 0.01), "c": (0.1, 0.19, 0.01)})
    assert {worker: row["is"] for worker, row in rows.items()} == {"a": "waits for data", "b": "", "c": ""}
    assert rows["a"]["relative"] == {"compute": 1.0, "wait": 0.0, "data": 20.0}
    assert in_words(rows["a"]) == "compute 100 ms (1.00x), wait 0 ms (0.00x), data 200 ms (20.00x): waits for data"


def test_who_is_behind_in_both_is_slow_and_where_all_wait_alike_nobody_is_named() -> None:
    assert compare({"a": (0.3, 0.0, 0.3), "b": (0.1, 0.4, 0.1), "c": (0.1, 0.4, 0.1)})["a"]["is"] == "slow"
    assert {row["is"] for row in compare(dict.fromkeys("abc", (0.1, 0.0, 5.0))).values()} == {""}
    usual = (0.1, 0.01, 0.0)
    little = compare({"a": (0.1, 0.0, 0.005), "b": usual, "c": usual})["a"]
    assert little["is"] == "", "less than a tenth of a step is no reason for a word"
    assert little["relative"]["data"] is None, "of nothing there is no multiple"


def test_the_last_steps_of_a_worker_count_and_those_of_who_left_are_forgotten() -> None:
    paces = Paces()
    for worker, data in (("a", 900_000), ("b", 10_000), ("c", 10_000)):
        event = types.WorkerStepTimes(
            worker=worker, time=1.0, step=0, compute=(100_000,) * 3, wait=(0,) * 3, data=(data,) * 3
        )
        paces.take(event)
    assert paces.rows(("a", "b", "c"))["a"]["is"] == "waits for data"
    assert set(paces.rows(("b", "c"))) == {"b", "c"}
    assert set(paces.rows(("a", "b", "c"))) == {"b", "c"}, "it would have to tell anew"


def test_metrics_have_each_part_of_a_workers_step() -> None:
    events = [event for event in story() if isinstance(event, types.WorkerStepTimes)]
    shared = [event for event in story() if event not in events]
    formed = next(n for n, event in enumerate(shared) if isinstance(event, types.StepCommitted))
    late = types.WorkerStepTimes(
        worker="n.b", time=105.0, step=0, compute=(300_000,) * 3, wait=(0,) * 3, data=(700_000,) * 3
    )
    view = told([*shared[:formed], events[0], late]).view
    families = {family.name: family for family in text_string_to_metric_families(exposition(view, 106.0))}
    found = {
        name: {(one.labels["rank"], one.labels["part"]): one.value for one in families[name].samples}
        for name in ("phalanx_worker_step_seconds", "phalanx_worker_step_relative")
    }
    assert found["phalanx_worker_step_seconds"] == {
        ("0", "compute"): 0.3, ("0", "wait"): 0.7, ("0", "data"): 0.0,
        ("1", "compute"): 0.3, ("1", "wait"): 0.0, ("1", "data"): 0.7,
    }  # fmt: skip
    assert found["phalanx_worker_step_relative"]["1", "data"] == 2.0
    assert found["phalanx_worker_step_relative"]["0", "compute"] == 1.0
