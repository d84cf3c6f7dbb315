"""Programs written for torch's Distributed Elastic give the same with one module path changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "elastic_programs.py"


def run(root: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(PROGRAM), root], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, f"{root}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "[sums0]:sum of 1 2" in done.stdout, "what is copied to the console begins with the name of the process"
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    return run("torch.distributed.elastic"), run("phalanx.launch")


@pytest.mark.parametrize(
    "name", ["custom_agent", "processes_with_logs", "recorded_errors", "timers", "told", "launched"]
)
def test_a_program_gives_what_it_gives_with_torchs_modules(results: tuple[dict[str, Any], ...], name: str) -> None:
    theirs, ours = results
    assert ours[name] == theirs[name]
