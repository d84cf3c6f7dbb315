"""What events add up to: long series stay small and right, files are followed, whatever is in them."""

from __future__ import annotations

import base64
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watching import formed, story, told

from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.watch import _files
from phalanx.watch._decimate import Curve, HeatMap
from phalanx.watch._files import TRUSTED, YOUNG, Listing, Tail, find_event_files
from phalanx.watch._hub import Hub
from phalanx.watch._in_words import in_words
from phalanx.watch._incidents import Incidents
from phalanx.watch._view import JobView, live_block

pytestmark = pytest.mark.fast


@given(st.lists(st.tuples(st.integers(0, 100), st.none() | st.floats(-5, 5)), min_size=1, max_size=200))
def test_a_decimated_curve_loses_no_sample_and_no_extreme(steps: list[tuple[int, float | None]]) -> None:
    curve = Curve(max_points=8)
    for number, (samples, loss) in enumerate(steps):
        curve.add(float(number + 1), number, loss, samples)
    rows = curve.rows()
    assert len(rows) <= 8 + 1
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert (rows[0][1], rows[-1][2]) == (0, len(steps) - 1)
    assert all(before[2] + 1 == after[1] for before, after in itertools.pairwise(rows))
    given_losses = [loss for _, loss in steps if loss is not None]
    if given_losses:
        assert min(row[4] for row in rows if row[4] is not None) == pytest.approx(min(given_losses), rel=1e-4)
        assert max(row[5] for row in rows if row[5] is not None) == pytest.approx(max(given_losses), rel=1e-4)
    total = sum(samples for samples, _ in steps[1:])
    begin = [1.0, *(row[0] for row in rows[:-1])]
    rated = sum((row[6] or 0.0) * (row[0] - since) for row, since in zip(rows, begin, strict=True))
    first_alone = rows[0][1] == rows[0][2]
    assert rated == pytest.approx(total + (0 if first_alone else steps[0][0]), rel=1e-3, abs=1e-3)


chunks = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.lists(st.integers(0, 10**6), min_size=1, max_size=7)),
    max_size=30,
)


@given(chunks)
def test_the_heat_map_is_that_of_the_plain_means(given_chunks: list[tuple[str, int, list[int]]]) -> None:
    heat = HeatMap(max_columns=8)
    naive: dict[str, dict[int, list[int]]] = {"a": {}, "b": {}}
    for worker, step, micros in given_chunks:
        heat.add(worker, step, micros)
        for number, value in enumerate(micros, step):
            naive[worker].setdefault(number, []).append(value)
    for worker, values in naive.items():
        cells = heat.cells(worker)
        assert len(cells) <= 8
        for column, cell in enumerate(cells):
            inside = [v for step, some in values.items() if step // heat.width == column for v in some]
            assert cell == (pytest.approx(sum(inside) / len(inside)) if inside else None)
        assert not [step for step in values if step // heat.width >= len(cells)]
    record = heat.to_record()
    levels = [level for row in record["rows"].values() for level in base64.b64decode(row)]
    assert all(0 <= level <= 255 for level in levels)


def test_a_large_job_stays_small() -> None:
    """64 workers and 20,000 steps here; the sizes do not depend on how many steps there are."""
    view = JobView()
    workers = tuple(f"w.{i}" for i in range(64))
    for worker in workers:
        view.take(formed(worker, 1.0, workers, joined=workers))
    times = (1000,) * 500
    for first in range(0, 20_000, 500):
        for worker in workers[:8]:
            view.take(
                types.WorkerStepTimes(
                    worker=worker, time=2.0 + first, step=first, compute=times, wait=times, data=times
                )
            )
        for step in range(first, first + 500):
            view.take(
                types.StepCommitted(
                    worker="w.0", time=2.0 + step, step=step, epoch=0, loss=1.0, samples=4, generation=0, round=0
                )
            )
    page = view.page(30_000.0)
    assert len(page["series"]) <= 600
    assert all(len(base64.b64decode(row)) <= 240 for row in page["steptimes"]["rows"].values())
    assert page["commits"]["holds_to"] == 20_000
    assert len(json.dumps(page)) < 200_000
    assert view.step_times.num == 8 * 20_000


def test_an_incident_is_one_whoever_tells_of_it_first() -> None:
    lost = types.GroupLost(worker="a", time=10.3, generation=0, step=3, reason="b is gone")
    failed = types.WorkerFailed(
        worker_id="b", rank=1, local_rank=1, pid=7, job="j", generation=0, time=10.1, exit_code=-9, cause="SIGKILL"
    )
    after = formed("a", 10.5, ("a",), generation=1, left=("b",))
    for order in ([failed, lost], [lost, failed]):
        incidents = Incidents()
        incidents.take(formed("a", 9.0, ("a", "b")))
        for event in [*order, after]:
            incidents.take(event)
        (found,) = [one.to_record() for one in incidents.found]
        assert (found["cause"], found["workers"], found["size"]) == ("SIGKILL", ["b"], 2)
        assert (found["detected_ms"], found["regrouped_ms"], found["full_ms"]) == (200.0, 400.0, None)


def test_files_are_followed_line_by_line(tmp_path: Path) -> None:
    hub = Hub()
    tail = Tail(hub, [tmp_path])
    assert tail.look() == 0
    path = tmp_path / "events-w.jsonl"
    line = to_json(types.TrainingStarted(worker="w", time=1.0, pid=7)).encode()
    path.write_bytes(line + b"\n" + line[:10])
    assert tail.look() == 1
    assert tail.look() == 0, "half a line is not one"
    with path.open("ab") as file:
        file.write(line[10:] + b"\nnonsense\n[1]\n")
    assert tail.look() == 3
    assert hub.view.counts["events"]["started"] == 2
    assert hub.view.num_bad == 2
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "events-link.jsonl").symlink_to(path)
    assert find_event_files(tmp_path) == [path], "a link and what it points at are one"
    path.unlink()
    assert tail.look() == 0


def test_a_directory_is_listed_again_when_it_may_have_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []

    def counted(directory: Path, *, depth: int) -> list[Path]:
        times.append(now)
        return find_event_files(directory, depth=depth)

    monkeypatch.setattr(_files, "find_event_files", counted)
    changed, now = 1000.0, 1000.0

    def change(name: str) -> None:
        (tmp_path / name).touch()
        os.utime(tmp_path, (changed, changed))

    listing = Listing(tmp_path, 0, lambda: now)
    change("events-a.jsonl")
    assert len(listing.files()) == 1
    change("events-b.jsonl")  # within the same tick of the kernel's clock
    now += YOUNG / 2
    assert len(listing.files()) == 2, "a young directory is not trusted"
    now += YOUNG
    listing.files()
    before = len(times)
    for _ in range(3):
        now += TRUSTED / 8
        assert len(listing.files()) == 2
    assert len(times) == before, "nothing has changed: nothing is listed"
    changed = now
    change("events-c.jsonl")
    assert len(listing.files()) == 3
    now += 2 * YOUNG
    listing.files()
    change("events-d.jsonl")  # where the time of a directory does not tell
    now += TRUSTED
    assert len(listing.files()) == 4


def test_a_line_is_kept_as_it_came_unless_it_would_end_early_in_the_stream(tmp_path: Path) -> None:
    record = {"time": 1.0, "event": "started", "worker": "w\u2028", "pid": 7}
    lines = [json.dumps(record), json.dumps(record).replace(", ", ",\r"), json.dumps(record, ensure_ascii=False)]
    (tmp_path / "events-w.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"\xff":1}\n')
    hub = Hub()
    assert Tail(hub, [tmp_path]).look() == 4
    kept = [event.line for event in hub.after(0)]
    assert kept[::2] == lines[::2]
    assert "\r" not in kept[1]
    assert [json.loads(line) for line in kept] == 3 * [record]
    assert hub.view.num_bad == 1


def test_a_node_that_told_its_load_before_the_rendezvous_is_one_node() -> None:
    view = JobView("j")
    load: dict[str, Any] = {"job": "j", "host": "h", "memory_used": 1, "memory_total": 2}
    view.take(types.NodeLoad(time=1.0, node="h", cpu=0.1, **load))
    for time, node in ((2.0, "h_1_a"), (2.1, "h_2_b"), (3.0, "h_1_a")):  # two agents of one machine
        view.take(types.NodeLoad(time=time, node=node, node_rank=0, cpu=0.5, **load))
    assert {row["node"]: row["cpu_history"] for row in view.nodes()} == {"h_1_a": [0.1, 0.5, 0.5], "h_2_b": [0.5]}


def test_slots_that_are_apart_are_counted_not_numbered() -> None:
    """Those of a sharded job: a worker computes one of each wave."""
    view, both = told(story()).view, ("n.a", "n.c")
    view.take(formed("n.c", 108.0, both, generation=1, round=2, first_slot=None, num_slots=3))
    row = {one.worker: one for one in view.lifelines.lives.values()}["n.c"].to_record()
    assert row["slots"][-1] == [108.0, None, 3]
    dealt = types.SlotsDealt(
        worker="n.a", time=109.0, step=5, generation=1, workers=both, sizes=(3, 2), pace=(0.1, 0.1), gain=1.1
    )
    view.take(dealt)
    slots = {one.worker: one.to_record()["slots"][-1] for one in view.lifelines.lives.values()}
    assert slots["n.a"] == [109.0, 0, 3]
    assert slots["n.c"] == [109.0, None, 2]


def test_the_account_at_the_end_is_told_in_words() -> None:
    account: dict[str, Any] = {"parts": {"productive": 8.0}, "failures": 0, "seconds": 5.0}
    event = types.GoodputTold(
        time=1.0, job="j", goodput=0.8, worker_seconds=10.0, text="goodput 80%, 0 failures", **account
    )
    assert in_words(event) == "goodput 80%, 0 failures"


def test_a_save_is_verified_when_it_was_read() -> None:
    view = told(story()[:-1]).view

    def verified() -> int | None:
        found: int | None = view.saves_record(110.0)["verified_step"]
        return found

    assert verified() == 3
    view.take(types.Saved(worker="n.a", time=109.0, step=8, path="s3://saves/8"))
    assert verified() == 3, "this one was not read"
    assert [one["verified"] for one in view.saves_record(110.0)["written"]] == [True, False]
    view.take(types.Resumed(worker="n.d", time=109.5, step=8))
    assert verified() == 8, "who goes on from it has read it"
    view.take(types.Saved(worker="n.a", time=109.7, step=9, path="/saves/9", verified=True))
    assert verified() == 9


def test_the_time_left_is_that_of_the_steps_that_are_left_while_the_job_runs() -> None:
    view = told(story()[:-1]).view  # 4 of 10 steps, one a second
    summary = view.summary(109.0)
    assert summary["step_seconds"] == pytest.approx(1.0)
    assert summary["eta_seconds"] == pytest.approx(6.0)
    assert view.summary(1e6)["eta_seconds"] is None, "silent: nobody knows"
    view.take(story()[-1])
    assert view.summary(109.0)["eta_seconds"] is None, "it is over"


def test_the_live_block_says_where_the_job_is() -> None:
    assert live_block(told(story()).view).split("\n") == [
        "step 4/10  loss 0.5000  8 samples/s  2 workers  generation 1",
        "last: n.c left after step 4, as it was told",
    ]


def test_the_live_block_takes_no_orders_from_a_message() -> None:
    view = told(story()).view
    view.news.append({"time": 1.0, "kind": "worker_failed", "text": "one\ntwo \x1b[2Jthree"})
    assert live_block(view).split("\n")[1:] == ["last: one two  [2Jthree"]


def test_in_a_copy_of_a_directory_no_event_is_read_twice(tmp_path: Path) -> None:
    """The link of an agent's folder still points at the original."""
    for folder in ("original", "copy/run"):
        (tmp_path / folder).mkdir(parents=True)
    original, copied = tmp_path / "original" / "events-v.jsonl", tmp_path / "copy" / "events-v.jsonl"
    for path in (original, copied):
        path.write_text(to_json(types.TrainingStarted(worker="v", time=1.0, pid=7)) + "\n")
    (tmp_path / "copy" / "run" / "events-v.jsonl").symlink_to(original)
    assert find_event_files(tmp_path / "copy") == [copied]


def node_formed(time: float, rank: int, *, generation: int = 0, num_nodes: int = 2) -> types.GenerationFormed:
    return types.GenerationFormed(
        job="j", time=time, generation=generation, node_rank=rank, num_nodes=num_nodes, num_workers=num_nodes,
        num_wanted=2,
    )  # fmt: skip


def node_ended(time: float, rank: int, *, generation: int = 0, succeeded: bool = True) -> types.ShutDown:
    return types.ShutDown(
        job="j", time=time, generation=generation, node_rank=rank, reason=f"of node {rank}", succeeded=succeeded
    )


def committed(time: float, step: int) -> types.StepCommitted:
    return types.StepCommitted(worker="n.a", time=time, step=step, epoch=0, loss=1.0, samples=8, generation=0, round=0)


@pytest.mark.parametrize("drained", [0, 1])
@pytest.mark.parametrize("is_told_late", [False, True])
def test_a_node_that_ends_early_does_not_end_the_job(drained: int, is_told_late: bool) -> None:
    view = JobView("j")
    for event in (node_formed(1.0, 0), node_formed(1.1, 1), committed(2.0, 0)):
        view.take(event)
    gone, regrouped = node_ended(3.0, drained), node_formed(3.1, 0, generation=1, num_nodes=1)
    for event in (regrouped, gone) if is_told_late else (gone, regrouped):
        view.take(event)
        assert (view.state, view.is_over) == ("running", False)
    assert view.summary(3.2)["wanted"] == 2, "what the job would have with all its nodes"
    view.take(committed(4.0, 1))
    assert view.summary(4.0)["state"] == "running"
    view.take(node_ended(5.0, 0, generation=1, succeeded=False))
    assert (view.state, view.reason) == ("ended", "of node 0")
    view.take(node_formed(6.0, 0, num_nodes=1))  # the next run, into the same directory
    view.take(committed(7.0, 2))
    assert not view.is_over


def test_of_a_node_whose_agent_nobody_hears_nobody_waits() -> None:
    """The log directory of one machine of several; and events that were written before they told the generation."""
    view = JobView("j")
    view.take(node_formed(1.0, 1))
    view.take(types.ShutDown(job="j", time=2.0, node_rank=1, reason="SUCCEEDED", succeeded=True))
    assert view.state == "succeeded"


def test_events_that_do_not_tell_how_many_are_wanted_can_still_be_read() -> None:
    record = json.loads(to_json(types.GenerationFormed(job="j", generation=0, num_nodes=1, num_workers=3)))
    del record["num_wanted"]
    hub = Hub()
    hub.add_record(record)
    assert (hub.view.num_bad, hub.view.summary(1.0)["wanted"]) == (0, 3)


def test_what_all_workers_decide_alike_is_told_once_and_in_words() -> None:
    view = JobView()
    for event in story()[:8]:
        view.take(event)
    before = len(view.news)
    for worker in ("n0.a", "n1.b"):
        common = {"time": 100.0, "worker": worker}
        view.take(types.StepSkipped(**common, step=5, epoch=0, reason="the loss is nan", in_row=1))
        view.take(types.RolledBack(**common, step=9, to=4, reason="the loss is 80"))
        view.take(types.NonFiniteFound(**common, step=11, reaction="stop"))
        wrong = {"what": "the gradient", "culprit": "n2.c", "slot": 3, "parameter": "0.weight", "element": 7}
        view.take(types.WrongBitsFound(**common, step=12, **wrong))
    assert [one["text"] for one in view.news][before:] == [
        "step 5 is left out: the loss is nan",
        "step 9 led back to the save of step 4: the loss is 80",
        "step 11 is not finite: stop",
        "n2.c has wrong bits in step 12: the gradient, slot 3, 0.weight[7]",
    ]
    view.take(types.StepSkipped(time=101.0, worker="n0.a", step=6, epoch=0, reason="the loss is nan", in_row=2))
    assert live_block(view).endswith("last: step 6 is left out: the loss is nan")
