"""Progress where nobody sits at a terminal: the first steps, then by time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.elastic.tools import _status_line
from phalanx.elastic.tools._status_line import FIRST_LINES, LINE_EVERY, StatusLine
from phalanx.events._event_types import StepCommitted

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("pace", "expected"), [(0.5, [0, 1, 2, 12, 22]), (2.0, [0, 1, 2, 5, 8]), (7.0, [0, 1, 2, 3, 4])]
)
def test_plain_lines_come_with_the_first_steps_and_then_by_time(
    pace: float, expected: list[int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert (FIRST_LINES, LINE_EVERY) == (3, 5.0)
    now = [100.0]
    monkeypatch.setattr(_status_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    line = StatusLine(enabled=True)
    for step in range(expected[-1] + 1):
        line.show(
            StepCommitted(step=step, epoch=0, loss=1.0, samples=8, generation=0, round=0, world_size=2), "no disk"
        )
        now[0] += pace
    said = capsys.readouterr().err.splitlines()
    assert [int(re.findall(r"step (\d+) ", one)[0]) for one in said] == expected
    head = f"phalanx: step {expected[-1]}  epoch 0  loss 1.0000  "
    assert said[-1] == f"{head}{8 / pace:.0f} samples/s  generation 0  2 workers  no disk"


def test_who_is_not_asked_says_nothing(capsys: Any) -> None:
    StatusLine(enabled=False).show(StepCommitted(step=0, epoch=0, loss=1.0, samples=8, generation=0, round=0), "")
    assert capsys.readouterr().err == ""
