"""What the workers of the streaming test run: a job over tar files; see ``worker_script`` for the files in DIR.

``python streaming_script.py DIR STEPS PACE [--loaders=N]``: beside its digest a worker writes the loader processes that
its samples came from.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch.nn import functional as F
from worker_script import hold, put

from phalanx.elastic import DataOptions, Job, RunOptions
from sharded_samples import pair, tar_dataset


def with_process(sample: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor, int]:
    return (*pair(sample), os.getpid())


def main() -> None:
    num_workers = int(next((word.partition("=")[2] for word in sys.argv if word.startswith("--loaders=")), 0))
    run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), num_workers)


def run(directory: Path, num_steps: int, pace: float, num_workers: int) -> str:
    """Train; steps and digest, which are written down too."""
    dataset = tar_dataset(Path(os.environ["STREAM_DATA"]))
    dataset.transform = with_process
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    job = Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dataset,
        num_slots=4,
        slot_batch_size=3,
        data=DataOptions(shuffle="shards", num_workers=num_workers),
        run=RunOptions(log_dir=directory / "logs", progress=False, threads=1, verify=True),
    )
    for name in ("store", "job"):
        put(directory / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")
    loaders: set[int] = set()
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, directory)
        for micro in step:
            x, y, processes = micro.batch
            loaders |= set(processes.tolist())
            micro.backward(F.cross_entropy(model(x), y))
            time.sleep(pace)
        step.commit()
    put(directory / f"loaders-{job.worker_id}", " ".join(map(str, sorted(loaders))))
    result = f"{job.step} {job.digest()}"
    put(directory / f"digest-{job.worker_id}", result)
    return result


if __name__ == "__main__":
    main()
