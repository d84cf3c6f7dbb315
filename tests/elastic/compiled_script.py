"""What the workers of a compiled elastic job run: ``python compiled_script.py DIR STEPS PACE BACKEND``.

Files in DIR decide as in ``worker_script``: ``hold`` names the step that nobody may pass. DIR gets ``digest-WORKER``,
``graphs-WORKER`` (how many it made before its seat, and in all), ``pid-WORKER`` and the logs.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from scripted_world import Rows
from torch import nn
from torch.nn import functional as F
from worker_script import hold, put

from phalanx.elastic import Job, RunOptions


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.3))


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def main() -> None:
    directory, num_steps, pace, backend = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    torch._inductor.config.compile_threads = 1
    torch.manual_seed(0)
    model = Dropping()
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    run = RunOptions(log_dir=directory / "logs", progress=False, threads=1, verify=True, timeout=120.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = Job(compiled, optimizer, Rows(128), num_slots=4, slot_batch_size=4, seed=0, run=run)  # no short batch
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(compiled(batch[0]), batch[1])

    job.warm_up(loss_of)
    before = num_graphs()
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, directory)
        for micro in step:
            micro.backward(loss_of((micro.inputs, micro.targets)))
            time.sleep(pace)
        step.commit(max_grad_norm=0.5)
    put(directory / f"graphs-{job.worker_id}", f"{before} {num_graphs()}")
    put(directory / f"digest-{job.worker_id}", job.digest())


if __name__ == "__main__":
    main()
