"""What the workers of the tracker test run: the job of ``elastic_training`` with the trackers that are named.

``python tracked_script.py DIR STEPS PACE NAME...``; files in DIR hold it as they do for ``worker_script``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from elastic_training import make_job
from torch.nn import functional as F
from worker_script import hold, put

from phalanx.elastic import RunOptions, Saves
from phalanx.integrations.trackers import MLflow, TensorBoard, Trackio, WandB


def main() -> None:
    directory, num_steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    known: dict[str, Any] = {
        "tensorboard": lambda: TensorBoard(directory / "tensorboard"),
        "wandb": lambda: WandB("tests", mode="offline", dir=str(directory)),
        "mlflow": lambda: MLflow("tests", uri=f"sqlite:///{directory}/mlflow.db"),
        "trackio": lambda: Trackio("tests"),
    }
    job = make_job(
        run=RunOptions(log_dir=directory / "logs", progress=False, threads=1),
        saves=Saves(directory=directory / "saves", every=5),
        trackers=[known[name]() for name in sys.argv[4:]],
    )
    for name in ("store", "job"):
        put(directory / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, directory)
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            time.sleep(pace)
        if step.commit():
            job.mean.update(job.model)
    job.close()


if __name__ == "__main__":
    main()
