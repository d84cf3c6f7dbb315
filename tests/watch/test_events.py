"""``phalanx events``: the newest are never missing, and who follows goes on at the agent that serves next."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watching import SECRET, Served, story, told

from phalanx.__main__ import main
from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.launch.cli import _events_command
from phalanx.launch.cli._events_command import Follower, _events_of_page
from phalanx.launch.cli._flags import UsageError
from phalanx.launch.cli._jobs import PageClient
from phalanx.watch import _hub
from phalanx.watch._access import PageAccess

pytestmark = pytest.mark.fast

LAST = types.Saved(worker="n.a", time=30_000.0, step=12_000, path="/saves/last")


def step(number: int) -> types.StepCommitted:
    return types.StepCommitted(
        worker="n.a", time=200.0 + number, step=number, epoch=0, loss=1.0, samples=8, generation=1, round=0
    )


def asked(**wish: bool) -> Namespace:
    return Namespace(**{"follow": False, "all": False, "json": True, **wish})


def shown(capsys: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def kinds(records: list[dict[str, Any]]) -> list[str]:
    return [record.get("event", record.get("kind", "")) for record in records]


@pytest.fixture
def served() -> Iterator[list[Served]]:
    """Two agents of one job; the second has heard the same."""
    made = [Served(PageAccess(secret=SECRET)) for _ in range(2)]
    for one in made:
        one.hub = told(story()[:-1])  # it still runs
        one.site._hub = one.hub
    yield made
    for one in made:
        one.close()


def test_the_newest_event_of_a_long_job_is_shown(served: list[Served], capsys: Any) -> None:
    first = served[0]
    for number in range(4, 12_000):
        first.hub.add(step(number))
    first.hub.add(LAST)
    assert _events_of_page(PageClient(first.client.url, SECRET), asked()) == 0
    records = shown(capsys)
    assert records[-1]["path"] == "/saves/last"
    assert not {"step", "times", "node_load"} & set(kinds(records))
    assert _events_of_page(PageClient(first.client.url, SECRET), asked(all=True)) == 0
    records = shown(capsys)
    assert [record["step"] for record in records if record.get("event") == "step"] == list(range(12_000))
    assert kinds(records).count("times") == 2
    assert records[-1]["path"] == "/saves/last"


def test_what_the_agent_does_not_keep_any_more_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(_hub, "MAX_KEPT", 10)
    served = Served(PageAccess(secret=SECRET))
    page = PageClient(served.client.url, SECRET)
    num = len(story()) - len([event for event in story() if event.kind in ("step", "times", "node_load")])
    assert _events_of_page(page, asked()) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 10
    assert f"{num - 10} earlier events are not kept" in said.err
    for number in range(4, 20):
        served.hub.add(step(number))
    assert _events_of_page(page, asked(all=True)) == 0
    assert f"{num - 10 + 20 - 10} earlier events are not kept" in capsys.readouterr().err, "steps count with --all"
    served.close()


def test_every_step_of_a_directory_is_shown_however_many_there_are(tmp_path: Path, capsys: Any) -> None:
    lines = [to_json(step(number)) for number in range(25_000)]
    (tmp_path / "events-n.a.jsonl").write_text("\n".join([*lines, "torn", to_json(LAST)]) + "\n")
    assert main(["events", str(tmp_path), "--all", "--json"]) == 0
    records = shown(capsys)
    assert [record["step"] for record in records[:-1]] == list(range(25_000))
    assert records[-1]["path"] == "/saves/last"


def test_the_api_gives_the_kinds_that_are_asked_for(served: list[Served]) -> None:
    def ask(query: str) -> list[str]:
        return kinds([one["event"] for one in served[0].client.json(f"/api/v1/events?{query}")["events"]])

    assert ask("kinds=saved,step") == ["step"] * 3 + ["saved", "step"]
    assert set(ask("")) - set(ask("without=step,saved")) == {"step", "saved"}
    assert ask("limit=0") == []
    (event,) = served[0].client.stream("/events?kinds=saved,lost&without=lost", 1)
    assert event["event"] == "saved"


def follow(first: Served, looks: list[Any]) -> Follower:
    """Of an agent that tells what it knows and ends; each look at the store then gives the next of ``looks``."""
    first.site.close()

    def look() -> Any:
        first.server.stop()
        found = looks.pop(0)
        return found() if callable(found) else found

    return Follower(PageClient(first.client.url, SECRET), look, asked(follow=True))


def test_who_follows_goes_on_at_the_next_agent_and_sees_each_event_once(served: list[Served], capsys: Any) -> None:
    first, second = served
    pages = [PageClient(one.client.url, SECRET) for one in served]

    def taken_over() -> tuple[PageClient, bool]:
        second.hub.add(LAST)
        second.hub.add(story()[-1])
        return pages[1], False

    # The store still names the one that is gone, has no page for a moment, then names another.
    assert follow(first, [(pages[0], False), (None, False), taken_over]).run() == 0
    records = shown(capsys)
    assert kinds(records)[-2:] == ["saved", "shut_down"]
    told_once = [event.kind for event in [*story(), LAST] if event.kind not in ("step", "times", "node_load")]
    assert sorted(kinds(records)) == sorted(told_once)


def test_a_job_whose_end_nobody_told_ends_who_follows_by_what_the_store_says(served: list[Served]) -> None:
    page = PageClient(served[0].client.url, SECRET)
    assert follow(served[0], [(page, True)]).run() == 0, "closed, and no agent is left"
    assert follow(served[1], [(None, True)]).run() == 0


def test_who_follows_is_told_when_nobody_says_how_the_job_goes_on(
    served: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_events_command, "PATIENCE", 0.0)

    def unreachable() -> Any:
        raise UsageError("the job's store cannot be reached")

    with pytest.raises(UsageError, match="none has told of its end"):
        follow(served[0], [unreachable]).run()


def test_the_store_of_a_job_ends_with_its_last_agent(served: list[Served]) -> None:
    """Another node's agent has ended before: what is not reached any more is over."""
    served[0].hub.add(
        types.GenerationFormed(time=109.0, job="j", generation=5, num_nodes=2, num_workers=2, node_rank=0)
    )
    served[0].hub.add(
        types.GenerationFormed(time=109.0, job="j", generation=5, num_nodes=2, num_workers=2, node_rank=1)
    )
    served[0].hub.add(types.ShutDown(job="j", reason="done", succeeded=True, time=110.0, generation=5, node_rank=0))

    def unreachable() -> Any:
        raise UsageError("the job's store cannot be reached")

    assert follow(served[0], [unreachable]).run() == 0
