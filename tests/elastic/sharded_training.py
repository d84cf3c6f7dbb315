"""A small sharded job that tests train, beside the same job unsharded: the bits must be one another's."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
from elastic_training import Count, Mean
from scripted_world import Rows
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx.elastic import DataOptions, Job, RunOptions
from phalanx.fsdp import fully_shard

NUM_SLOTS = 8
BUILDING = threading.Lock()


class Blocks(nn.Module):
    """Dropout, buffers, a parameter that some slots use, one that none does, a frozen one, one that is shared.

    ``is_random=False`` is for workers in threads of one process, which have one generator together.
    """

    def __init__(self, *, is_random: bool = True) -> None:
        super().__init__()
        self.is_random = is_random
        self.first = nn.Linear(8, 40)
        self.middle = nn.Sequential(nn.Linear(40, 60), nn.Dropout(0.1 * is_random), nn.GELU(), nn.Linear(60, 40))
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 5)
        self.extra, self.never = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((5,), 0.1), requires_grad=False)
        self.again = self.last.bias
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.zeros(40), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        x = F.relu(self.first(x))
        x = self.norm(x + self.middle(x)) + self.drift
        self.drift = self.drift + 0.1 * x.detach().float().mean(0)
        out = self.last(x) + self.frozen + 0.1 * self.again
        is_used = torch.rand(()) < 0.1 if self.is_random else x.detach().mean() > 0.05
        return out * self.extra if is_used else out


def build(*, sharded: bool, is_random: bool = True) -> nn.Module:
    with BUILDING:  # threads have one generator together
        torch.manual_seed(0)
        model = Blocks(is_random=is_random)
    return shard(model) if sharded else model


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model.first)
    fully_shard(model.middle)
    return fully_shard(model)


class Named:
    """An average of the weights by their names, made anew by every update, and a number."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.total = torch.zeros(3)

    def update(self, model: nn.Module) -> None:
        self.total += 1
        for name, param in model.named_parameters():
            self.shadow[name] = self.shadow[name] * 0.9 + 0.1 * param.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = dict(state["shadow"])
        self.total.copy_(state["total"])


class Averages:
    """What a user may keep of the weights: torch's average, a list, a dict; and a count."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` is not sharded yet: a copy of it is made."""
        self.objects = {
            "count": Count(),
            "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        }

    def add(self, model: nn.Module) -> None:
        self.objects |= {"mean": Mean(model), "named": Named(model)}

    def update(self, model: nn.Module) -> None:
        for name, one in self.objects.items():
            one.update_parameters(model) if name == "ema" else one.update(model)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    if kind == "muon":
        return torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02)
    if kind == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_job(
    kind: str = "adamw",
    *,
    sharded: bool = True,
    is_random: bool = True,
    group: Any = None,
    parts: int = 1,
    run: Any = None,
    **keywords: Any,
) -> Job:
    model = build(sharded=False, is_random=is_random)
    averages = Averages(model)
    if sharded:
        shard(model)
    averages.add(model)
    optimizer = make_optimizer(kind, model)
    if not sharded:
        keywords.pop("copies", None)
    job = Job(
        model,
        optimizer,
        Rows(),
        num_slots=NUM_SLOTS,
        slot_batch_size=4,
        seed=0,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
        data=DataOptions(parts=parts),
        run=run or RunOptions(progress=False, group=group, verify=True, threads=1),
        state=averages.objects,
        **keywords,
    )
    job.count = averages  # for train() below
    return job


def sha(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def weights(job: Job) -> str:
    """sha256 of all weights and buffers, and the job's digest; of a sharded job, all workers call it."""
    return f"{sha(job.full_state_dict())} {job.digest()}"


def train(job: Job, *, max_steps: int = 8, clip: float | None = 0.5, autocast: bool = False) -> list[Any]:
    told = []
    for step in job.steps(max_steps=max_steps):
        for micro in step:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(job.model(micro.inputs), micro.targets)
            micro.backward(loss)
        if step.commit(max_grad_norm=clip):
            job.count.update(job.model)
            told.append((step.number, step.loss, step.grad_norm, step.num_samples))
    return told
