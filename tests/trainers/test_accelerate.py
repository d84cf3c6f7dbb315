"""accelerate under ``phalanx run``: a script that knows nothing of us, and the documented loop that survives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import HERE

pytestmark = pytest.mark.timeout(600)

EXAMPLES = HERE.parents[1] / "examples"


def run(directory: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PHALANX_JOB_SECRET": "s" * 32}
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=directory, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--drop-in=ddp"], marks=pytest.mark.soak)], ids=["plain", "drop-in"]
)
def test_an_unmodified_script_trains_on_two_workers_as_under_torchrun(tmp_path, flags):
    script = str(HERE / "accelerate_script.py")
    run(tmp_path / "ours", "-m", "phalanx", "run", "--nproc-per-node=2", *flags, script, ".")
    run(tmp_path / "theirs", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, ".")
    digest = (tmp_path / "ours" / "digest").read_text()
    assert digest.startswith("2 ")
    assert digest == (tmp_path / "theirs" / "digest").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["accelerate_loop.py", "lightning_classifier.py", "hf_language_model.py"])
def test_an_example_gives_the_same_digest_alone_and_on_two_workers(tmp_path, name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
    script = [str(EXAMPLES / name), "--epochs=1", "--samples=256"]
    alone = run(tmp_path / "alone", *script)
    both = run(tmp_path / "both", "-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal", *script)
    (line,) = [line for line in alone.splitlines() if " steps, " in line]
    assert line in both
