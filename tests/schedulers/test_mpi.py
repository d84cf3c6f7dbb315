"""Processes that ``mpirun`` starts: directly, and as agents that start workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent / "sum_of_ranks.py")


def mpirun(*words: str) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (apt-get install openmpi-bin)")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_init_understands_what_mpirun_says(tmp_path):
    mpirun(SCRIPT, str(tmp_path))
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2 0 1", "2 1 1"]


@pytest.mark.soak
def test_mpirun_starts_agents_that_find_one_another(tmp_path):
    mpirun("-m", "phalanx", "run", "--rdzv-backend", "mpi", "--nproc-per-node", "2", SCRIPT, str(tmp_path))
    told = [(tmp_path / f"rank{rank}").read_text() for rank in range(4)]
    assert told == ["4 0 6", "4 1 6", "4 0 6", "4 1 6"]
