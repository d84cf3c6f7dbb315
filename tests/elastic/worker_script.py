"""What the workers of the fault tests run: the job of ``elastic_training``, slowed down, its result written to a file.

``python worker_script.py DIR STEPS PACE``: DIR gets ``digest-WORKER``, the logs and the saves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elastic_training import make_job
from torch.nn import functional as F

from phalanx.elastic import RunOptions, Saves


def main() -> None:
    directory, num_steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    saves = Saves(directory=directory / "saves", every=5) if "--save" in sys.argv else None
    job = make_job(
        run=RunOptions(log_dir=directory / "logs", progress=False, threads=1, verify=True, timeout=60),
        saves=saves,
    )
    (directory / "store").write_text(os.environ.get("PHALANX_STORE", ""))
    (directory / "job").write_text(os.environ.get("PHALANX_JOB", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (directory / f"pid-{job.worker_id}").write_text(f"{os.getpid()} {started}")
    for step in job.steps(max_steps=num_steps):
        fail(directory / f"fail-{job.worker_id}")
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            time.sleep(pace)
        if step.commit(max_grad_norm=1.0):
            job.mean.update(job.model)
    (directory / f"digest-{job.worker_id}").write_text(f"{job.step} {job.digest()}")


def fail(wish: Path) -> None:
    """Fail in the way that the test has written down for this worker, if it has."""
    if wish.exists():
        kind = wish.read_text()
        wish.unlink()
        if kind == "raise":
            raise RuntimeError("told to fail")
        if kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "exit":
            os._exit(3)


if __name__ == "__main__":
    main()
