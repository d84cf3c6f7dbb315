"""What the workers of the tensor parallel fault tests run: the job of ``tensor_training``, slowed down.

``python tensor_script.py DIR STEPS PACE``; files in DIR decide as in ``worker_script``: ``hold`` names the step that
nobody may pass, DIR gets ``digest-WORKER`` and the logs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tensor_training import make_job, weights
from torch.nn import functional as F
from worker_script import hold, put

from phalanx.elastic import RunOptions, job_mesh


def main() -> None:
    directory, num_steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    run = RunOptions(log_dir=directory / "logs", progress=False, threads=1, verify=True, timeout=120.0)
    job = make_job(job_mesh(tp=2), run=run, copies=2)
    for name in ("store", "job"):
        put(directory / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, directory)
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            time.sleep(pace)
        step.commit(max_grad_norm=0.5)
    put(directory / f"digest-{job.worker_id}", weights(job))


if __name__ == "__main__":
    main()
