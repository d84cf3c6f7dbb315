"""Declares what the sharded side of a job asks of the job, and of the step that is under way."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.membership._regroup import Regrouping
from phalanx.elastic.membership._training import Training
from phalanx.elastic.sharded._slot_numbers import StepNumbers
from phalanx.elastic.sharded._verdict import StepVerdict


class PreparedStep(Protocol):
    """A step that this worker can make when another has made it."""

    number: int

    @property
    def numbers(self) -> StepNumbers | None:
        """What all workers know when it is reduced; None: this worker is not prepared."""

    def follow(self, verdict: StepVerdict) -> None:
        """Be behind it as another worker is."""


class ShardedJob(Training, Protocol):
    """A job whose model is sharded; ``phalanx.elastic.Job`` is one."""

    optimizer: torch.optim.Optimizer
    seed: int
    regrouping: Regrouping

    def resume(self, state: State, *, is_first: bool) -> None:
        """Become what was saved, apart from what is in cells; the first worker begins a new attempt."""

    def hold_objects(self, state: State) -> None:
        """Keep the user's objects of a worker that is ahead until this one's loop has come to the same place."""

    def take_parts(self, parts: State) -> None:
        """Take model, optimizer and objects of a save, apart from what is in cells."""

    def move_on(self, step: Any) -> None:
        """Be behind a step: scheduler, position and what is told of it."""
