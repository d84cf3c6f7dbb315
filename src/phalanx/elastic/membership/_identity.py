"""What makes two workers' jobs the same job, and, where they are not, in what they differ.

Pure apart from looking at the job. Workers exchange ``identity`` when they sit down: short, whatever the model's size.
Only when the models differ do they exchange ``describe_model`` too, so that the error can name the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.elastic.checkpoint._state import digest

if TYPE_CHECKING:
    from phalanx.elastic._job import Job

MAX_NAMED = 3
"""How many differing tensors an error describes before it only counts them."""


def identity(job: Job) -> dict[str, Any]:
    """What must be equal on all workers; ``model`` stands for all of ``describe_model``."""
    sampler = job.schedule.sampler
    groups = [len(group["params"]) for group in job.optimizer.param_groups]
    return {
        "num_slots": job.num_slots,
        "slot_batch_size": job.slot_batch_size,
        "seed": job.seed,
        "steps_per_epoch": sampler.steps_per_epoch,
        "order": sampler.order.name,
        "tail": sampler.tail,
        "parts": job.schedule.num_parts,
        "guard": job.guarding.guard.nonfinite,
        "model": digest(list(describe_model(job).items())),
        "optimizer": f"{type(job.optimizer).__name__} of {'+'.join(map(str, groups))} parameters",
    }


def describe_model(job: Job) -> dict[str, str]:
    """Every parameter and buffer in order: what it is, and its dtype and shape."""
    found = {
        f"parameter {name}": _describe(param) + ("" if param.requires_grad else ", frozen")
        for name, param in job.model.named_parameters()
    }
    return found | {f"buffer {name}": _describe(buffer) for name, buffer in job.model.named_buffers()}


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def tell_apart(first: str, one: Mapping[str, str], second: str, other: Mapping[str, str]) -> str:
    """In what the models of two workers differ.

    >>> tell_apart("a", {"parameter w": "float32 (2,)"}, "b", {"parameter w": "float32 (3,)", "buffer n": "int64 ()"})
    'parameter w is float32 (2,) on worker a and float32 (3,) on b; buffer n is only on b'
    """
    found = []
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in other:
            found.append(f"{name} is only on {first}")
        elif name not in one:
            found.append(f"{name} is only on {second}")
        elif one[name] != other[name]:
            found.append(f"{name} is {one[name]} on worker {first} and {other[name]} on {second}")
    if not found:
        mine, theirs = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
        return f"parameters and buffers come in another order: {mine} on worker {first} where {theirs} is on {second}"
    more = f"; {len(found) - MAX_NAMED} more differ" if len(found) > MAX_NAMED else ""
    return "; ".join(found[:MAX_NAMED]) + more
