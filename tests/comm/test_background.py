"""Helper threads: begun again after a failure, and never gone without a word."""

from __future__ import annotations

import ast
import logging
import threading
from pathlib import Path

import pytest

import phalanx
from phalanx.comm import _background
from phalanx.comm._background import Background

pytestmark = pytest.mark.fast

EXEMPT = {
    "comm/_background.py": "makes them",
    "launch/timer/api.py": "its loop outlives every error, and users may ask for a thread that is no daemon",
    "comm/simulation/_simulate.py": "ranks of a simulation: it joins them and raises what they raised",
    "comm/transports/_release.py": "drops a reference, which cannot raise",
    "comm/stores/_torch_link.py": "connects anew while its caller waits, for a limited time, and sees what came of it",
    "launch/system/_path_probe.py": "imports no torch; nothing that is sent ends it, and it counts what it refused",
    "launch/cli/_head_start.py": "loads a library before anything else is imported, and is joined",
}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_the_system_knows_a_thread_by_its_name() -> None:
    found: list[str] = []

    def body() -> None:
        found.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())

    thread = Background(body, "phalanx-exit-barrier", on_failure=found.append)
    thread.start()
    thread.join(30)
    assert found == ["phalanx-exit-ba\n"]  # Linux keeps 15 characters


def test_a_body_that_fails_is_begun_again_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_background, "FIRST_PAUSE", 0.001)
    runs: list[int] = []
    heard: list[BaseException] = []

    def body() -> None:
        runs.append(len(runs))
        raise KeyError(len(runs))

    with caplog.at_level(logging.ERROR):
        thread = Background(body, "demo", on_failure=heard.append, attempts=3)
        thread.start()
        thread.join(60)
    assert len(runs) == 3
    assert [str(error) for error in heard] == ["3"]
    assert [record.getMessage() for record in caplog.records] == [
        "the thread demo failed (1 in a row); it begins again",
        "the thread demo failed (2 in a row); it begins again",
        "the thread demo failed (3 in a row); it ends",
    ]


def test_a_body_that_recovers_is_never_given_up_and_a_final_error_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_background, "FIRST_PAUSE", 0.001)
    heard: list[BaseException] = []
    outcomes = [ValueError(), ValueError(), None]

    def body() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    thread = Background(body, "demo", on_failure=heard.append)
    thread.start()
    thread.join(60)
    assert outcomes == []
    assert heard == []
    outcomes[:] = [ConnectionError("gone"), None]
    thread = Background(body, "demo", on_failure=heard.append, final=(ConnectionError,))
    thread.start()
    thread.join(60)
    assert outcomes == [None]
    assert [str(error) for error in heard] == ["gone"]


def test_an_owner_that_stops_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_background, "FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(_background, "LONGEST_PAUSE", 1000.0)
    stop = threading.Event()
    thread = Background(lambda: 1 / 0, "demo", on_failure=lambda error: None, stop=stop)
    thread.start()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def test_every_helper_thread_is_one_whose_end_is_noticed() -> None:
    source = Path(phalanx.__file__).parent
    bare = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Thread")
    }
    assert bare == set(EXEMPT)
