"""Computes one micro-batch and forgets it: what the first call compiles is compiled before others wait for it.

Owns ``warm_up``. A worker that comes while others train takes its seat when its loop begins; until then they go on
without it. What this does is not part of the job: weights, buffers, gradients and random numbers are as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx._devices import HOST, accelerator
from phalanx.elastic._rng import derive_seed, seed_everything

if TYPE_CHECKING:
    from phalanx.elastic._job import Job


def warm_up(job: Job, loss_of: Callable[[Any], Tensor]) -> None:
    """Run ``loss_of(batch)`` and its backward on the first batch that the job's data gives, and undo what they did."""
    if job.regrouping.has_begun:
        raise RuntimeError("warm_up() after the job has begun: the others wait by now; call it before the first step")
    if job.sharding is not None:
        raise ValueError(
            "warm_up() of a sharded model: its workers have each a part of it, and nothing to compute with before they "
            "have met. Leave it out; its graphs are made in the first step"
        )
    schedule = job.schedule
    ticket = next(t for slot in range(job.num_slots) for t in schedule.tickets(schedule.step, slot))
    with _nothing_kept(job.model):
        batch = job.loading.fetcher[ticket]
        seed_everything(derive_seed(job.seed, "compute", ticket.step, ticket.slot, ticket.part))
        loss_of(batch).backward()


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients and the generators that ``seed_everything`` seeds back at the end of the block."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices, kind = (accelerator() or HOST).generators()
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            random.setstate(of_python)
            np.random.set_state(of_numpy)
