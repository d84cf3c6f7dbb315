"""Small jobs that tests train: every source of randomness and state that the guarantee speaks of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from phalanx.elastic import DataOptions, Job

NUM_SLOTS, SLOT_BATCH, SEED = 8, 4, 3


class Pictures(torch.utils.data.Dataset):
    """Generated images with augmentation drawn from all three global generators."""

    def __init__(self, length: int = 203) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 3, 6, 6, generator=generator)
        self.y = torch.randint(0, 5, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(3, 6, 6) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.x[index] + noise, self.y[index]


class Mean:
    """A user's object: an average of the weights, updated after each commit."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        for value, param in zip(self.values, model.parameters(), strict=True):
            value.lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.count = list(state["values"]), state["count"]


class Kink(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


class Sometimes(nn.Module):
    """Has a parameter that only some steps use, one that none does, and a buffer that the result depends on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Parameter(torch.ones(5))
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("drift", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x) + self.drift
        self.drift = self.drift + 0.1 * x.mean()
        return out * self.extra if torch.rand(()) < 0.05 else out


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Sometimes(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(288, 5),
        )
    )


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


class Count:
    """A user's object: a number of commits."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make_job(
    kind: str = "adamw",
    parts: int = 1,
    num_workers: int = 0,
    length: int = 203,
    copies: int | None = None,
    **keywords: Any,
) -> Job:
    """With ``copies`` the model is sharded."""
    model = make_model()
    if copies is not None:
        from phalanx.fsdp import fully_shard

        fully_shard(model.inner[0])
        fully_shard(model.inner[5])
        fully_shard(model)
        keywords["copies"] = copies
    optimizer = make_optimizer(kind, model)
    mean = Mean(model)
    job = Job(
        model,
        optimizer,
        Pictures(length),
        num_slots=NUM_SLOTS,
        slot_batch_size=SLOT_BATCH,
        seed=SEED,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
        state={"mean": mean},
        data=DataOptions(parts=parts, num_workers=num_workers),
        **keywords,
    )
    job.mean = mean  # for train() below
    return job


def train(job: Job, *, wait_for_saves: bool = False, **limits: int) -> list[float]:
    """The loop of the README; the losses of the committed steps.

    With ``wait_for_saves`` every save that is due is written before the next step; else a newer one may replace it.
    """
    losses = []
    for step in job.steps(**limits):
        if wait_for_saves:
            job.saving.wait_idle()
        for micro in step:
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        if step.commit(max_grad_norm=1.0):
            job.mean.update(job.model)
            losses.append(step.loss)
    return losses
