"""What a worker of a test does wrong when it is told to: one bit of weights, of a slot's gradient, or of a message.

A file ``lie-WORKER`` says it: ``STEP weights``, ``STEP gradient SLOT`` or ``STEP message``. A lie lasts as long as its
step does, however often that comes again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from phalanx.elastic import Job


class Lie(NamedTuple):
    step: int
    kind: str
    slot: int = -1

    @classmethod
    def of(cls, path: Path) -> Lie | None:
        if not path.exists():
            return None
        step, kind, *slot = path.read_text().split()
        return cls(int(step), kind, *map(int, slot))


def flip(tensor: torch.Tensor, element: int) -> None:
    """Change the lowest bit of one element."""
    tensor.detach().reshape(-1).view(torch.int32)[element].bitwise_xor_(1)


class Flipped(torch.autograd.Function):
    """The identity; the gradient of its first element comes back with another bit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 16)
        return grad


def before_step(job: Job, lie: Lie | None, step: int) -> None:
    if lie is None or lie.step != step:
        return
    if lie.kind == "weights":
        flip(job.model.extra, 1)
    if lie.kind == "message":
        group = job.regrouping.membership.group
        real = group.all_to_all

        def all_to_all(outputs, inputs, **keywords):
            work = real(outputs, inputs, **keywords)
            work.wait()
            flip(next(output for rank, output in enumerate(outputs) if rank != group.rank and output.numel()), -1)
            return work

        group.all_to_all = all_to_all


def of_output(lie: Lie | None, step: int, slot: int, output: torch.Tensor) -> torch.Tensor:
    """Return what the model has computed; its gradient will be wrong if that is the lie."""
    return Flipped.apply(output) if lie == Lie(step, "gradient", slot) else output
