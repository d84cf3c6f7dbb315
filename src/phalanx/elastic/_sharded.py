"""Finds out whether a job's model is sharded, and makes what such a job has besides. Loads ``fsdp`` only if it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.elastic._guard import Guard
from phalanx.elastic._guarding import Guarding
from phalanx.elastic._step import Step
from phalanx.elastic._verify_slots import VerifySlots
from phalanx.elastic._verifying import Verifying
from phalanx.elastic.checkpoint._state import Stateful, StatefulObjects

if TYPE_CHECKING:
    from phalanx.elastic._job import Job
    from phalanx.elastic.sharded._sharding import JobSharding

MARK = "_phalanx_fully_sharded"
"""What ``fully_shard`` leaves on a module (``fsdp.schedule``)."""


def make_sharding(job: Job, copies: Any, spread: str, objects: Mapping[str, Stateful]) -> JobSharding | None:
    """Return the sharded side of a job whose model ``fully_shard`` was called on; None for any other.

    Raises ``ValueError`` for ``copies`` and ``spread`` that are nothing, or not possible with this model.
    """
    if spread not in ("node", "worker"):
        raise ValueError(f"spread is {spread!r}; expected 'node' (copies on different nodes) or 'worker' (anywhere)")
    if copies is not None and copies != "all" and (type(copies) is not int or copies < 1):
        raise ValueError(f"copies is {copies!r}; expected 'all' or a number of at least 1")
    if not any(MARK in module.__dict__ for module in job.model.modules()):
        if copies not in (None, "all"):
            raise ValueError(
                f"copies={copies} needs a model that is sharded: call fully_shard on its blocks and on itself before "
                "the job is made. Without that every worker holds everything, copies='all'"
            )
        _refuse_distributed(job.model)
        return None
    from phalanx.elastic.sharded._sharding import JobSharding  # start-up: jobs of whole replicas need no fsdp

    wanted = 2 if copies is None else copies
    return JobSharding(job, copies=wanted, spread=spread, objects=objects)


def _refuse_distributed(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor, ours or torch's; their modules may not be loaded
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__} on {parameter.device_mesh}: a job whose workers "
                "hold everything would take each worker's shard for the whole. Build the model on "
                "phalanx.elastic.job_mesh(tp=...), and call fully_shard(..., mesh=mesh['dp']) on its blocks and on "
                "itself"
            )


def make_guarding(job: Job, guard: Guard, *, has_saves: bool) -> Guarding:
    """Return what looks at the steps of a job."""
    if job.sharding is None:
        return Guarding(job, guard, has_saves=has_saves)
    from phalanx.elastic._sharded_guarding import ShardedGuarding  # start-up: as above

    return ShardedGuarding(job, guard, job.sharding, has_saves=has_saves)


def make_verifying(job: Job, options: VerifySlots | None) -> Verifying:
    """Return what has slots of a job computed twice."""
    if job.sharding is None:
        return Verifying(job, options)
    from phalanx.elastic._sharded_verifying import ShardedVerifying  # start-up: as above

    return ShardedVerifying(job, options, job.sharding)


def make_step(job: Job) -> Step:
    """Return the next step of a job."""
    if job.sharding is None:
        return Step(job)
    from phalanx.elastic._sharded_step import ShardedStep  # start-up: as above

    return ShardedStep(job, job.sharding)


def objects_of(
    sharding: JobSharding | None, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful]
) -> StatefulObjects:
    """Return the objects whose state is the job's; of a sharded model and its optimizer, what every worker has."""
    if sharding is None:
        return StatefulObjects(model, optimizer, others)
    from phalanx.elastic.sharded._small_state import SmallState  # start-up: as above

    return SmallState(model, optimizer, others, sharding.objects)
