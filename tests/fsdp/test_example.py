"""What people look at first: the example, run as its docstring says, and the picture of the document."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp import unit_picture

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_lm.py"


def loss_after(num_ranks: int, steps: int, out: Path) -> float:
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(num_ranks), str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--out", str(out)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"loss ([\d.]+); rank 0 holds (\d+)", done.stdout)
    assert found, done.stdout
    assert (int(found[2]) < 500_000) == (num_ranks == 2), "half of 816,186 numbers each"
    return float(found[1])


@pytest.mark.timeout(800)
def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    straight = loss_after(2, 4, tmp_path / "straight")
    loss_after(2, 2, tmp_path / "halves")
    assert loss_after(1, 4, tmp_path / "halves") == pytest.approx(straight, abs=2e-3)


def test_the_picture_shows_todays_layouts() -> None:
    assert unit_picture.PICTURE.read_text() == unit_picture.draw()
