"""Checks what a script gives to a job: its optimizer, and the state of a loop that is not the job's.

A trainer with its own counters, schedulers and callbacks is such a loop: it runs on every worker and changes its state
after each commit, alike on all. So a survivor never takes it from another, not even when it takes a step over: it runs
its own end of that step. The same holds for the options in the optimizer's ``param_groups``, which the loop's
schedulers set. Only a newcomer takes everything. The state is made when a newcomer, a save or the end of the job asks
for it, and no digest covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx._torch_faults import check_fused
from phalanx.elastic.checkpoint._state import Stateful
from phalanx.elastic.membership._coordinator import Ejected

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise if a job could not step with it, or would step something else than the model."""
    check_fused(optimizer, "Job")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "a Job cannot use LBFGS: it computes the gradient several times in a step, and a step of a job is one sum "
            "of gradients and one update. Use an optimizer that needs the gradient once, such as AdamW or SGD"
        )
    known = {id(p) for p in model.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ValueError(
                    f"the optimizer's group {i} holds a parameter of shape {tuple(param.shape)} that is not the "
                    "model's; build the optimizer from model.parameters() of the same model"
                )


def check_loop_state(given: Mapping[str, Stateful] | None, *, is_sharded: bool) -> dict[str, Stateful]:
    """Return the objects, or raise what is wrong with them."""
    objects = dict(given or {})
    for name, part in objects.items():
        if not isinstance(part, Stateful):
            raise TypeError(
                f"loop_state[{name!r}] is a {type(part).__name__} without state_dict and load_state_dict; give it both"
            )
    if objects and is_sharded:
        raise ValueError("loop_state with a sharded model is not supported; put what the loop changes into state=")
    return objects


def check_next(job: Job, number: int) -> None:
    """Raise when the others are so far ahead that this worker's loop cannot follow them step by step."""
    if job.loop_state and job.step != number + 1:
        raise Ejected(
            f"worker {job.worker_id} was away at step {number} while the others came to step {job.step}; its loop has "
            "state of its own that cannot skip steps, so this process ends and another takes its place"
        )
