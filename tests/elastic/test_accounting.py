"""The account of a real job whose faults are scripted: no part is less than what the script spent on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.events._event_types import Saved
from phalanx.watch import PARTS, goodput
from phalanx.watch._files import read_job_events

STEPS, SLOTS, SAMPLES = 12, 4, 2
START, SLOT, SAMPLE, SAVE = 0.2, 0.01, 0.004, 0.3

SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import torch
from phalanx.elastic import Job, RunOptions, Saves
from phalanx.elastic.checkpoint import _saving

time.sleep({START})
out, copy = Path(sys.argv[1]), _saving.copy_encoded

def slow_copy(*words):
    if not (out / "slow").exists():
        (out / "slow").touch()
        time.sleep({SAVE})
    return copy(*words)

_saving.copy_encoded = slow_copy

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return {STEPS * SLOTS * SAMPLES}
    def __getitem__(self, index):
        time.sleep({SAMPLE})
        return torch.full((4,), float(index))

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
job = Job(model, torch.optim.SGD(model.parameters(), lr=1e-6), Rows(), num_slots={SLOTS}, slot_batch_size={SAMPLES},
          saves=Saves(directory=out / "saves", every=8), run=RunOptions(progress=False, threads=1, balance=False))
for step in job.steps(until_finish=True):
    for micro in step:
        time.sleep({SLOT})
        micro.backward(model(micro.batch).square().mean())
    if step.number == 5 and job.generation == 0:
        if job.rank == 1:
            while not (out / "computed").exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        (out / "computed").touch()
    if step.commit() and job.generation and job.world_size == 2 and step.number >= {STEPS - 1}:
        job.finish()  # not before there is one in its place, which all see alike
"""


@pytest.mark.timeout(200)
def test_each_part_of_the_account_has_what_the_script_spent_on_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal",
               f"--log-dir={tmp_path / 'logs'}", str(script), str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    events = list(read_job_events(tmp_path / "logs"))
    assert any(isinstance(event, Saved) for event in events)
    account = goodput(events)
    assert sum(account.parts.values()) == account.total
    assert set(account.parts) == set(PARTS)
    least = {
        "start": 3 * START,  # two workers, and one in the place of the one that was killed
        "productive": STEPS * SLOTS * SLOT,  # of steps that count
        "data": STEPS * (SLOTS // 2) * SAMPLES * SAMPLE,  # of the worker that was there from the beginning to the end
        "save": SAVE,
        "repeated": SLOTS // 2 * (SLOT + SAMPLES * SAMPLE),  # its part of the step that was dropped
    }
    for part, seconds in least.items():
        assert account.parts[part] >= 1e6 * seconds * 0.999, (part, account)
    assert (account.parts["hang"], account.parts["surplus"], account.parts["untold"]) == (0, 0, 0)
    assert (account.num_failures, len(account.repair_seconds)) == (1, 1)
    assert account.total >= 1e6 * sum(least.values())
    assert re.search(r"phalanx: goodput \d+\.\d%, 1 failure, MTTR ", done.stderr), "said before the last event"
