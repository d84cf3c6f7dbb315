"""The log files of workers on other machines: from their agents, to whoever has the token, and nothing but these."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from watching import AGENT, SECRET, Doing, Served

from phalanx.__main__ import main
from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.launch.cli import _look_commands
from phalanx.launch.cli._jobs import PageClient
from phalanx.launch.system._folders import RunningJob
from phalanx.watch import _log_files
from phalanx.watch._access import PageAccess, token_of
from phalanx.watch._log_files import lines_since

pytestmark = pytest.mark.fast

BEARER = f"Bearer {token_of(SECRET)}"


class Keeping(Doing):
    """An agent with log files."""

    def __init__(self, events: Path) -> None:
        super().__init__()
        self.events = events

    def logs(self, rank: str, node: str, since: str) -> dict[str, Any]:
        return lines_since(self.events, rank, node, since)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two workers, ranks 4 and 5 of the job, each with a line on both streams."""
    folder = tmp_path / "run"
    folder.mkdir()
    started = [
        types.WorkerStarted(worker_id=f"n.{i}", rank=4 + i, time=1.0, **{**AGENT, "local_rank": i}) for i in (0, 1)
    ]
    (folder / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in started))
    for local in (0, 1):
        (folder / "attempt_0" / str(local)).mkdir(parents=True)
        for stream in ("stdout", "stderr"):
            (folder / "attempt_0" / str(local) / f"{stream}.log").write_text(f"{stream} of {4 + local}\n")
    return folder


@pytest.fixture
def served(run: Path) -> Iterator[Served]:
    made = Served(PageAccess(host="0.0.0.0", secret=SECRET), Keeping(run / "events.jsonl"))
    yield made
    made.close()


def test_an_agent_tells_the_new_lines_of_its_own_files(served: Served, run: Path) -> None:
    assert served.client.ask("/api/v1/logs")[0] == 401, "without the token"
    first = served.client.json("/api/v1/logs?rank=5&node=h", Authorization=BEARER)
    assert [(one["rank"], one["stream"], one["line"]) for one in first["lines"]] == [
        (5, "stderr", "stderr of 5"),
        (5, "stdout", "stdout of 5"),
    ]
    assert served.client.json("/api/v1/logs?node=elsewhere", Authorization=BEARER)["lines"] == []
    since = quote(first["since"])
    assert served.client.json(f"/api/v1/logs?rank=5&since={since}", Authorization=BEARER)["lines"] == []
    with (run / "attempt_0" / "1" / "stdout.log").open("a") as file:
        file.write("more\nhalf")
    again = served.client.json(f"/api/v1/logs?rank=5&since={since}", Authorization=BEARER)
    assert [one["line"] for one in again["lines"]] == ["more"]


def test_no_other_file_is_ever_read(served: Served, run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not for you\n")
    (run / "attempt_0" / "1" / "stdout.log").unlink()
    (run / "attempt_0" / "1" / "stdout.log").symlink_to(tmp_path / "secret")  # as a worker could make it
    (run / "attempt_1").symlink_to(tmp_path)
    os.mkfifo(run / "attempt_0" / "0" / "stdin.log")
    (run / "attempt_0" / "0" / "stdout.log").unlink()
    os.mkfifo(run / "attempt_0" / "0" / "stdout.log")  # would keep its reader waiting
    for words in ("", "?since=../../secret:0", "?rank=../secret", "?node=../", "?since=0.0.stderr:99999"):
        body = served.client.ask(f"/api/v1/logs{words}", Authorization=BEARER)[2]
        assert b"not for you" not in body
        assert all(one["stream"] == "stderr" for one in json.loads(body)["lines"])


def test_an_answer_is_bounded_and_says_that_there_is_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log_files, "MAX_ANSWER", 20)
    (run / "attempt_0" / "0" / "stdout.log").write_text("a line of more than 20 bytes\n" + "x\n" * 50)
    answer: dict[str, Any] = {"since": "", "more": True}
    told: list[str] = []
    while answer["more"]:
        answer = lines_since(run / "events.jsonl", "4", "", answer["since"])
        assert sum(len(one["line"]) for one in answer["lines"]) <= 20
        told += [one["line"] for one in answer["lines"]]
    assert told == ["stderr of 4", "a line of more than ", "20 bytes", *["x"] * 50]


def test_the_command_asks_the_agents_of_other_machines(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    @contextmanager
    def opened(job: RunningJob) -> Iterator[tuple[None, bytes]]:
        yield None, SECRET

    gone = PageClient("http://127.0.0.1:1/", SECRET)
    monkeypatch.setattr(_look_commands, "open_job", opened)
    monkeypatch.setattr(_look_commands, "log_dirs_here", lambda job: [])
    monkeypatch.setattr(
        _look_commands, "pages_elsewhere", lambda store, secret, is_here: [PageClient(served.client.url, SECRET), gone]
    )
    where = ["--rdzv-endpoint=node0:29400", "--rdzv-id=j"]
    assert main(["logs", "--rank", "4", "--json", *where]) == 0
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert lines == [{"rank": 4, "stream": name, "line": f"{name} of 4"} for name in ("stderr", "stdout")]
    assert "http://127.0.0.1:1/ does not answer" in said.err, "a node that is not shown is named"
    assert main(["logs", "--rank", "9", *where]) == 2
    assert "no log files of such workers" in capsys.readouterr().err
