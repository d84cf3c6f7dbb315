"""Scripts that know nothing of us under ``phalanx run``, and the documented loop of accelerate that survives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import HERE, Run

pytestmark = pytest.mark.timeout(600)

EXAMPLES = HERE.parents[1] / "examples"
ABORTED = "terminate called without an active exception"


def run(directory: Path, *command: str, may_end_with: str = "") -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PHALANX_JOB_SECRET": "s" * 32}
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=directory, env=environment
    )
    if not may_end_with or may_end_with not in done.stderr:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "flags", "kinds"),
    [
        pytest.param("accelerate_script.py", [], "torch.nn.parallel.distributed", id="accelerate"),
        pytest.param("lightning_ddp_script.py", [], None, id="lightning"),
        pytest.param("hf_ddp_script.py", [], None, id="hf", marks=pytest.mark.soak),
        pytest.param("accelerate_script.py", ["--drop-in=ddp"], "phalanx.ddp.wrapper._wrapper",
                     id="accelerate drop-in"),
        pytest.param("lightning_ddp_script.py", ["--drop-in=ddp"], None, id="lightning drop-in",
                     marks=pytest.mark.soak),
        pytest.param("hf_ddp_script.py", ["--drop-in=ddp"], None, id="hf drop-in", marks=pytest.mark.soak),
        pytest.param("accelerate_fsdp2_script.py", ["--drop-in=fsdp,tensor"], "phalanx.fsdp", id="fsdp2 drop-in",
                     marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_an_unmodified_script_trains_on_two_workers_as_under_torchrun(tmp_path, name, flags, kinds):
    script = str(HERE / name)
    run(tmp_path / "ours", "-m", "phalanx", "run", "--nproc-per-node=2", *flags, script, ".")
    # Torch's own threads abort a process now and then while it leaves its group: only this end of torch's launcher is
    # passed over, and what its worker wrote at the end of the script is compared all the same.
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    run(tmp_path / "theirs", *torchrun, script, ".", may_end_with=ABORTED)
    digest = (tmp_path / "ours" / "digest").read_text()
    assert digest.startswith("2 ")
    assert digest == (tmp_path / "theirs" / "digest").read_text()
    if kinds is not None:
        assert kinds in (tmp_path / "ours" / "kinds").read_text()
        assert "phalanx" not in (tmp_path / "theirs" / "kinds").read_text()


def test_the_documented_loop_survives_kills(tmp_path):
    alone = Run("accelerate_elastic_script.py", tmp_path / "alone")
    run = Run("accelerate_elastic_script.py", tmp_path / "run", "0:4:batch,1:9:batch,0:15:batch", "2", workers=2)
    assert len(list(run.directory.glob("done-*"))) == 3, "not all of them were killed"
    (line,) = [line for line in alone.console.splitlines() if " steps, " in line]
    assert line.startswith("16 steps")
    assert line in run.console


@pytest.mark.soak
@pytest.mark.parametrize("name", ["accelerate_loop.py", "lightning_classifier.py", "hf_language_model.py"])
def test_an_example_gives_the_same_digest_alone_and_on_two_workers(tmp_path, name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
    script = [str(EXAMPLES / name), "--epochs=1", "--samples=256"]
    alone = run(tmp_path / "alone", *script)
    both = run(tmp_path / "both", "-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal", *script)
    (line,) = [line for line in alone.splitlines() if " steps, " in line]
    assert line in both
