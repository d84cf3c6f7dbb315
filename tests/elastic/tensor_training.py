"""A small tensor parallel job that tests train, beside the same job without tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from scripted_world import Rows
from sharded_training import BUILDING, NUM_SLOTS, sha
from torch import nn
from torch.nn import functional as F

from phalanx.comm import DeviceMesh
from phalanx.elastic import Job, RunOptions, job_mesh
from phalanx.fsdp import fully_shard
from phalanx.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 48), nn.Linear(48, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(seed: int = 0) -> nn.Module:
    with BUILDING:  # threads have one generator together
        torch.manual_seed(seed)
        return nn.Sequential(Block(), Block(), nn.Linear(8, 5))


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in (model[0], model[1]):
        parallelize_module(block, mesh["tp"], {name: style() for name, style in PLAN.items()}, src_data_rank=None)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def make_job(mesh: DeviceMesh | None, *, group: Any = None, run: Any = None, seed: int = 0, **keywords: Any) -> Job:
    """Return the job on a mesh; None: whole replicas of the same model."""
    model = build(seed)
    if mesh is not None:
        distribute(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Job(
        model,
        optimizer,
        Rows(),
        num_slots=NUM_SLOTS,
        slot_batch_size=4,
        seed=0,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
        run=run or RunOptions(progress=False, group=group, verify=True, threads=1),
        **keywords,
    )


def train(job: Job, *, max_steps: int = 8, clip: float | None = 0.5) -> list[Any]:
    told = []
    for step in job.steps(max_steps=max_steps):
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        if step.commit(max_grad_norm=clip):
            told.append((step.number, step.loss, step.grad_norm, step.num_samples))
    return told


def on_ranks(group: Any, degree: int, copies: Any) -> tuple[list[Any], dict[str, torch.Tensor], str]:
    """Train on simulated ranks; what was told of the steps, the whole model, and the digest."""
    job = make_job(job_mesh(tp=degree), group=group, copies=copies)
    return train(job), job.full_state_dict(), job.digest()


def score(job: Job) -> float:
    """Evaluate in batches of which some groups have one more than others; all workers call it."""

    def loss(batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

    return job.evaluate(Rows(50), loss, batch_size=8)["loss"]


def weights(job: Job) -> str:
    """sha256 of all weights and buffers, and the job's digest; all workers call it."""
    return f"{sha(job.full_state_dict())} {job.digest()}"
