"""What the workers of the tests of the end run: a short job, then what follows the loop, held up where a test says.

``python after_script.py DIR STEPS PACE [PLAN]``. After the loop every worker writes ``after-RANK`` (its id) and waits
for a file ``go-RANK``, or ``go`` for all; then rank 0 writes ``result``. PLAN is what else the script does there: it
``evaluate``s, ``changes`` the model, ``raise``s or ``exit``s once, or trains a second job (``twice``).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from elastic_training import Pictures, make_job, train
from torch.nn import functional as F
from worker_script import put

from phalanx.elastic import RunOptions


def main() -> None:
    directory, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    plan = sys.argv[4:]
    job = make_job(run=options(directory / "logs"))
    for name in ("store", "job"):
        put(directory / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")
    train(job, max_steps=num_steps)
    put(directory / f"after-{job.rank}", job.worker_id)
    final = f"{job.step} {job.digest()}"
    if "changes" in plan:
        for param in job.model.parameters():
            torch.nn.init.zeros_(param)  # what is handed over must not be this
    if "evaluate" in plan:
        result = job.evaluate(Pictures(64), lambda batch: score(job, batch, directory), batch_size=4)
        put(directory / f"evaluated-{job.rank}-{job.worker_id}", repr(result["loss"]))
    for kind in ("raise", "exit"):
        fault = directory / f"{kind}-{job.rank}"
        if fault.exists():
            fault.unlink()
            if kind == "raise":
                raise RuntimeError("told to fail after the loop")
            os._exit(3)
    while not ((directory / f"go-{job.rank}").exists() or (directory / "go").exists()):
        time.sleep(0.01)
    if "twice" in plan:
        second = make_job("sgd", run=options(directory / "logs2"))
        train(second, max_steps=num_steps)
        put(directory / f"second-{second.rank}", f"{second.step} {second.digest()}")
    if job.rank == 0:
        put(directory / "result", final)
    put(directory / f"end-{job.rank}", job.worker_id)
    if "quick" in plan and job.rank == 1:
        os._exit(0)  # no exit function runs


def options(logs: Path) -> RunOptions:
    return RunOptions(log_dir=logs, progress=False, threads=1, timeout=120)


def score(job, batch, directory: Path):
    put(directory / f"scoring-{job.worker_id}", "")
    while (directory / "hold-evaluation").exists() and not (
        job.regrouping.coordinator.signals.broken or (directory / "go-evaluation").exists()
    ):
        time.sleep(0.01)
    return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}


if __name__ == "__main__":
    main()
