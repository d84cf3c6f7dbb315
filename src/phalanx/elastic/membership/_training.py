"""Declares what regrouping asks of a job: its state, how far it is, and where it tells what happens."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from phalanx.elastic._options import Callbacks, RunOptions
from phalanx.elastic.checkpoint._saving import Saving
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.membership._final_state import Encoded
from phalanx.elastic.reduce._partials import Pool
from phalanx.events._writer import EventLog


class Training(Protocol):
    """A job, as far as the workers around it are concerned; ``phalanx.elastic.Job`` is one."""

    model: nn.Module
    num_slots: int
    pool: Pool
    run: RunOptions
    callbacks: Callbacks
    events: EventLog
    saving: Saving
    is_fresh: bool
    """Whether this worker has no state yet that counts."""
    attempt: int
    num_evaluations: int
    last_evaluation: dict[str, float]

    @property
    def step(self) -> int:
        """Return the number of committed steps."""

    @property
    def is_before_evaluation(self) -> bool:
        """Return whether this worker still has to come to an evaluation that the others are in."""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all workers."""

    def state_dict(self) -> State: ...

    def copy_state(self) -> Encoded: ...

    def take_state(self, state: State) -> None: ...

    def take_over(self, state: State) -> None: ...

    def count_evaluation(self, result: dict[str, float]) -> None: ...

    def save(self) -> None: ...

    def load_save(self) -> bool: ...

    def begin_attempt(self) -> None: ...
