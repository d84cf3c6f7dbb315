"""The example and the benchmark of sharding, run as users run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_recommender_trains_and_moves_from_four_workers_to_two_and_three() -> None:
    out = run("examples/recommender.py")
    first, last = map(float, re.search(r"trained: loss ([\d.]+) -> ([\d.]+)", out).groups())
    assert last < first
    for size in (2, 3):
        assert f"saved on 4 workers, loaded on {size}: the same answers, bit for bit" in out
    assert "users.weight: by rows" in out


@pytest.mark.timeout(300)
def test_the_benchmark_compares_every_case() -> None:
    lines = run("-m", "benchmarks.shard", "--quick").splitlines()
    found = {line.split(" ours ")[0].strip(): float(re.search(r"ratio (\S+)", line)[1]) for line in lines}
    cases = ("shard_module", "gather", "reshard and back")
    assert set(found) == {
        *(f"{case} ({g})" for case in cases for g in ("gloo", "auto")),
        "save (auto)",
        "load (auto)",
    }
    assert all(ratio > 0 for ratio in found.values())
