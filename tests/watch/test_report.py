"""The page and the report: one file, everything in it, nothing that a job says becomes a tag."""

from __future__ import annotations

import hmac
import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from watching import EVIL, Client, story, told

from phalanx.__main__ import main
from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.watch._files import Tail
from phalanx.watch._page_file import page_html, page_policy
from phalanx.watch._report import report_data, with_details

pytestmark = pytest.mark.fast


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A job's directory, as its agent and workers write it; its texts are evil."""
    directory = tmp_path / "logs"
    (directory / "run_1").mkdir(parents=True)
    files: dict[str, list[str]] = {}
    for event in story(EVIL):
        name = f"events-{event.worker}.jsonl" if hasattr(event, "worker") else "run_1/events.jsonl"
        files.setdefault(name, []).append(to_json(event))
    for name, lines in files.items():
        (directory / name).write_text("\n".join(lines) + "\n")
    return directory


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_command_writes_one_file_with_everything_in_it(logs: Path, tmp_path: Path, capsys: Any) -> None:
    with (logs / "events-torn.jsonl").open("w") as file:
        file.write('7\n{"time": "now"}\n{"event": "step", "time": 1, "worker": "w"}\n{"time": 1')
    out = tmp_path / "out.html"
    assert main(["report", str(logs), "-o", str(out)]) == 0
    assert "1 failure" in capsys.readouterr().out
    page = out.read_text()
    tags = Tags()
    tags.feed(page)
    scripts = [attributes for tag, attributes in tags.found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}], "the data, and ours"
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in tags.found}
    assert all("src" not in attributes and "href" not in attributes for _, attributes in tags.found)
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
    (policy,) = [a["content"] for tag, a in tags.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == page_policy()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert data["details"]["n.b"]["stderr"] == [EVIL]
    assert data["facts"] == [["lines that were no events", "3"]]
    assert main(["report", str(logs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["step"] == 4


def test_a_report_that_cannot_be_written_leaves_nothing_and_says_so(logs: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "folder").mkdir()
    assert main(["report", str(logs), "-o", str(tmp_path / "folder")]) == 1
    assert "the report cannot be written to" in capsys.readouterr().err
    assert not list(tmp_path.glob(".folder*"))


def test_a_job_without_events_has_a_page_too(tmp_path: Path) -> None:
    data = report_data([tmp_path])
    assert data["summary"]["step"] is None
    assert "<main>" in page_html(data)


def test_events_and_logs_are_read_from_a_directory(logs: Path, capsys: Any) -> None:
    assert main(["events", str(logs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("worker_failed" in line and "rank 1 (n.b) failed, ValueError" in line for line in lines)
    assert not any(" step " in line[:30] for line in lines)
    assert main(["events", str(logs), "--json", "--all"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["time"] for r in records] == sorted(r["time"] for r in records)
    assert {r.get("event", r.get("kind")) for r in records} >= {"step", "times", "node_load", "worker_failed"}
    for local, text in ((0, "first\n"), (1, "second\ntorn")):
        folder = logs / "run_1" / "attempt_0" / str(local)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(text)
    assert main(["logs", str(logs)]) == 0
    assert capsys.readouterr().out == "rank 1: first\nrank 1: second\n"  # as the events of the agent say
    assert main(["logs", str(logs), "--json", "--rank", "1", "--node", "h"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [{"rank": 1, "stream": "stdout", "line": "first"}], "nobody told on which node the other was"
    for words in (["--rank", "0"], ["--node", "elsewhere"]):
        assert main(["logs", str(logs), *words]) == 2
        assert "--tee 3" in capsys.readouterr().err
    assert main(["logs", str(logs / "nowhere")]) == 2


@pytest.mark.parametrize("command", ["events", "logs"])
def test_who_follows_gets_what_comes_until_the_job_is_over(
    command: str, logs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, log = logs / "run_1" / "events.jsonl", logs / "run_1" / "attempt_0" / "0" / "stdout.log"
    *before, end = agents.read_text().splitlines(keepends=True)
    assert "shut_down" in end
    agents.write_text("".join(before))
    log.parent.mkdir(parents=True)
    log.write_text("first\n")

    def something_happens(seconds: float) -> None:
        log.write_text("first\nlast\n")
        agents.write_text("".join([*before, end]))

    monkeypatch.setattr(time, "sleep", something_happens)
    assert main([command, str(logs), "--follow"]) == 0
    told = capsys.readouterr().out
    assert told.count("first") == told.count("last") == (1 if command == "logs" else 0)
    assert ("shut_down" in told) == (command == "events")


def test_a_directory_is_shown_as_a_page(logs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(tail: Tail, stopped: threading.Event) -> None:
        """Look once, and let a person look."""
        tail.look()
        [address] = re.findall(r"is shown at (http://127.0.0.1:\d+/) ", capsys.readouterr().out)
        seen.append(Client(address).json("/api/v1/summary"))

    monkeypatch.setattr(Tail, "follow", look)
    assert main(["dashboard", str(logs), "--bind", "0"]) == 0
    assert (seen[0]["state"], seen[0]["step"]) == ("succeeded", 4)
    assert main(["dashboard", str(logs / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err


needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no node: `apt install nodejs`")


def in_node(page: Path, *workers: str) -> Any:
    """What the script makes of a page, and of clicks on some workers."""
    script = Path(__file__).parent / "page_in_node.js"
    done = subprocess.run(["node", str(script), str(page), *workers], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_script_shows_the_story(tmp_path: Path) -> None:
    """In node, with a document of few classes: what the script puts into the page, and its signature."""
    page = tmp_path / "page.html"
    page.write_text(page_html({**told(story(EVIL)).read(with_details), "live": False, "facts": []}))
    shown = in_node(page, "n.b", "n.c")
    assert not {"script", "img"} & set(shown["names"]), "text became a tag"
    texts = shown["texts"]
    assert EVIL in texts["tiles"]
    assert "4 / 10step" in texts["tiles"]
    assert shown["rows"] == [["n.a", "finished"], ["n.b", "died"], ["n.c", "left"]]
    assert set(shown["marks"]) == {"join", "death", "save", "lost", "hang", "leave", "end"}
    assert "slots 0–1" in texts["workers"]
    assert "ValueError" in texts["incidents"]
    assert "holds to step 4" in texts["commits"]
    assert "1 compared, all equal" in texts["commits"]
    assert "productive" in texts["goodput"]
    assert "step 3, 3.4 s ago" in texts["saves"]
    assert "step 3 was read back from the disk" in texts["saves"]
    assert "50%" in texts["nodes"]
    assert "1.5 KB/s" in texts["nodes"]
    assert "2.5 MB/s" in texts["nodes"]
    assert "node m is left out" in texts["nodes"]
    assert "generation 1.0: 1 worker from step 0 on; left n.b" in texts["news"]
    assert texts["news"].count("generation 0.0") == 1, "told by each of its workers, shown once"
    assert "2 copies; nothing is unprotected" in texts["n-copies"]
    assert shown["bad"] == ""
    assert EVIL in shown["details"]["n.b"], "the last lines of the one that died"
    assert f"Stacksin all_reduce: {EVIL}" in shown["details"]["n.c"], "what the one that hung was doing"
    for told_of in ("hang", "made no progress for 5 s", "told to leave"):
        assert told_of in shown["details"]["n.c"]
    expected = [hmac.digest(b"k" * len(m), m.encode(), "sha256").hex() for m in ("", "a", "x" * 200)]
    assert shown["hmac"] == expected


@needs_node
def test_what_the_loss_of_a_machine_would_cost_is_red(tmp_path: Path) -> None:
    alone = types.CellsHeld(
        worker="n.a", time=107.5, step=4, cells=9, owned=5, mirrors=(), unprotected=4, copies=2, bytes=9000,
        unprotected_bytes=4000,
    )  # fmt: skip
    page = tmp_path / "page.html"
    page.write_text(page_html({**told([*story()[:-1], alone]).read(with_details), "live": False, "facts": []}))
    shown = in_node(page)
    assert shown["bad"] == "bad"
    assert "4 KB UNPROTECTED" in shown["texts"]["n-copies"]
    assert "nobody" in shown["texts"]["copies"]
