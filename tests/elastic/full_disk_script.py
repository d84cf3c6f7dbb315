"""Trains the job of ``elastic_training`` in this process while its disk takes nothing more for some steps.

``python full_disk_script.py DIR FIRST LAST``: from step FIRST on files cannot grow (a limit that the kernel enforces),
from step LAST on they can again. With ``--leave`` a SIGTERM comes at step FIRST + 1. DIR gets logs and saves.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from elastic_training import make_job
from torch.nn import functional as F

from phalanx.elastic import RunOptions, Saves

NUM_STEPS = 10


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def main() -> None:
    directory, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    job = make_job(
        run=RunOptions(log_dir=directory / "logs", progress=False, threads=1),
        saves=Saves(directory=directory / "saves", every=2, keep=9),
    )
    for step in job.steps(max_steps=NUM_STEPS):
        if step.number == first:
            job.saving.wait_idle()
            limit(1024)
        if step.number == last:
            limit(resource.RLIM_INFINITY)
        if step.number == first + 1 and "--leave" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        if step.commit(max_grad_norm=1.0):
            job.mean.update(job.model)
    print(job.digest())


if __name__ == "__main__":
    main()
