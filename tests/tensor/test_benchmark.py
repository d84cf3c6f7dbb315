"""The benchmark of DTensors, run as users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_the_benchmark_compares_every_case() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dtensor", "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    ratios = dict(re.findall(r"^(\S.*?) +([\d.]+)x +[\d.]+x$", done.stdout, re.MULTILINE))
    assert list(ratios) == [
        "forward",
        "forward+backward",
        "redistribute",
        "transformer block",
        "AdamW foreach",
        "AdamW for-loop",
        "AdamW fused",
    ]
    assert all(float(ratio) > 0 for ratio in ratios.values())
