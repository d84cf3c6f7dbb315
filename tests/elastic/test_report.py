"""The history of a job and the page that shows it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.elastic.tools._history import read_history
from phalanx.elastic.tools._report import main, render
from phalanx.events._event_types import (
    RoundFormed,
    StepCommitted,
    TrainingFinished,
    TrainingLeft,
    TrainingStarted,
)
from phalanx.events._writer import EventLog

pytestmark = pytest.mark.fast


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three workers; w.1 dies at step 5, w.3 joins, w.2 leaves politely."""
    clock = itertools.count(1000)  # of the records alone: other threads look at the real one
    monkeypatch.setattr("phalanx.events._lines.time", SimpleNamespace(time=lambda: next(clock) / 10))
    files = {f"w.{i}": EventLog(tmp_path / f"events-w.{i}.jsonl", worker=f"w.{i}") for i in range(4)}

    def regroup(generation, round_, workers, joined, left, step):
        for worker in workers:
            mine = workers if worker in joined else joined
            files[worker].write(RoundFormed(
                generation=generation, round=round_, workers=workers, joined=mine, left=left, step=step,
                seconds=0.02 if worker not in joined else 9.0,
            ))  # fmt: skip

    def steps(numbers, generation, round_):
        for step in numbers:
            files["w.0"].write(
                StepCommitted(
                    step=step,
                    epoch=0,
                    loss=3.0 / (step + 1),
                    samples=32,
                    generation=generation,
                    round=round_,
                )
            )

    for worker in ("w.0", "w.1", "w.2"):
        files[worker].write(TrainingStarted(pid=1))
    regroup(0, 0, ["w.0", "w.1", "w.2"], ["w.0", "w.1", "w.2"], [], 0)
    steps(range(5), 0, 0)
    regroup(1, 0, ["w.0", "w.2"], [], ["w.1"], 5)
    steps(range(5, 8), 1, 0)
    files["w.3"].write(TrainingStarted(pid=2))
    regroup(1, 1, ["w.0", "w.3", "w.2"], ["w.3"], [], 8)
    steps(range(8, 20), 1, 1)
    files["w.2"].write(TrainingLeft(step=20))
    for worker in ("w.0", "w.3"):
        files[worker].write(TrainingFinished(step=20))
    for file in files.values():
        file.close()
    return tmp_path


def test_history(logs):
    history = read_history(logs)
    assert [mark.step for mark in history.steps] == list(range(20))
    assert {life.worker: life.end for life in history.lives} == {
        "w.0": "finished", "w.1": "died", "w.2": "left", "w.3": "finished",
    }  # fmt: skip
    died = next(life for life in history.lives if life.end == "died")
    assert died.seen == history.steps[4].time, "it took part in the steps that another worker wrote down"
    changes = [(mark.round, mark.joined, mark.left, mark.step) for mark in history.rounds]
    assert changes[1:] == [((1, 0), (), ("w.1",), 5), ((1, 1), ("w.3",), (), 8)]
    assert history.rounds[2].seconds == 0.02, "how long the newcomer took to start is not the regroup"
    assert all(rate > 0 for _, rate in history.throughput())


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(logs):
    page = render(read_history(logs), title="A <test> & more", facts=[("steps", "20")], digests=["ab" * 32] * 2)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    names = [tag for tag, _ in checker.tags]
    assert names.count("svg") == 3
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not re.search(r"https?://|url\(", page)
    assert "A &lt;test&gt; &amp; more" in page
    assert "the same bits" in page
    assert "DIFFERENT BITS" in render(read_history(logs), title="", digests=["a", "b"])
    assert names.count("polyline") == 4, "one line per round, and the throughput"


def test_no_text_of_an_event_becomes_a_tag(logs):
    """Names, and fields that should be numbers; lines that are no events are left out and counted."""
    evil = "<script>alert(1)</script>"
    step = {"step": 3, "epoch": 0, "loss": 1.0, "samples": 4, "generation": 0, "round": 0}
    regrouped = {
        "generation": 9,
        "round": 0,
        "workers": [evil],
        "joined": [evil],
        "left": [evil],
        "step": 1,
        "seconds": 1,
    }
    lines = [{"time": 101.0, "worker": f"a.{evil}", "event": kind, **fields} for kind, fields in (
        (evil, {}), ("regrouped", regrouped), *[("step", {**step, name: evil}) for name in step],
        *[("regrouped", {**regrouped, name: evil}) for name in regrouped])]  # fmt: skip
    with (logs / "events-evil.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, 7, {"time": "now"}, {}])
        file.write('{"time": 1')
    history = read_history(logs)
    page = render(history, title=evil, facts=[(evil, evil)], digests=[evil])
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert history.num_torn == 1 + 6 + 7 + 3, "of an unknown kind, or with a field of another type"
    assert "17 lines of the event files were torn" in page
    checker = Checker()
    checker.feed(page)
    assert checker.open == []


def test_a_report_that_cannot_be_written_leaves_nothing_and_says_so(logs, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert main([str(logs), str(tmp_path / "folder")]) == 1
    assert "the report cannot be written to" in capsys.readouterr().err
    assert not list(tmp_path.glob(".folder*"))


def test_a_job_without_steps_has_a_page_too(tmp_path):
    assert "No step was committed" in render(read_history(tmp_path), title="empty")


def test_the_command(logs, tmp_path, capsys):
    assert main([str(logs), str(tmp_path / "out.html")]) == 0
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="no Chromium on this machine",
)
@pytest.mark.timeout(300)
def test_chromium_opens_it(logs, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    main([str(logs), str(tmp_path / "out.html")])
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    done = subprocess.run(
        [browser, *flags, f"file://{tmp_path / 'out.html'}"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0
    assert done.stdout.count("<svg") == 3
