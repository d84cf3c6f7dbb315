"""Declares what regrouping asks of a job: its state, how far it is, and where it tells what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from phalanx.elastic._options import Callbacks, RunOptions
from phalanx.elastic.checkpoint._saving import Saving
from phalanx.elastic.checkpoint._state import State, Stateful
from phalanx.elastic.membership._coordinator import Coordinator
from phalanx.elastic.membership._final_state import Encoded
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.reduce._partials import Pool
from phalanx.elastic.reduce._reduction import Reduction
from phalanx.elastic.tools._step_clock import StepClock
from phalanx.events._writer import EventLog


class Dealt(Protocol):
    """What a job knows of the speed of its workers."""

    pace: dict[str, float]
    """Seconds that a slot takes, by worker."""


class Writing(Protocol):
    """What decides which worker writes; ``Regrouping`` is it."""

    def came_at(self, membership: Membership) -> list[int]: ...

    def choose_writer(self, membership: Membership, came: Sequence[Sequence[int]]) -> None: ...


class Training(Protocol):
    """A job, as far as the workers around it are concerned; ``phalanx.elastic.Job`` is one."""

    model: nn.Module
    num_slots: int
    pool: Pool
    run: RunOptions
    callbacks: Callbacks
    events: EventLog
    clock: StepClock
    saving: Saving
    is_fresh: bool
    """Whether this worker has no state yet that counts."""
    attempt: int
    loop_state: Mapping[str, Stateful]
    """What the loop itself changes after commits; only a newcomer takes it."""
    num_evaluations: int
    last_evaluation: dict[str, float]

    @property
    def dealing(self) -> Dealt:
        """Return what is known of the workers' speed."""

    @property
    def regrouping(self) -> Writing:
        """Return who keeps the list of writers."""

    @property
    def step(self) -> int:
        """Return the number of committed steps."""

    @property
    def is_sharded(self) -> bool:
        """Return whether each worker has a part of the state: all are needed for a save and heard in a step."""

    @property
    def is_before_evaluation(self) -> bool:
        """Return whether this worker still has to come to an evaluation that the others are in."""

    def form(self, membership: Membership) -> Reduction:
        """Take a place in a round: return how gradients are summed there."""

    def bring_level(self, coordinator: Coordinator, membership: Membership) -> None:
        """Make this worker's state that of the round's most advanced worker. Raises as collectives do."""

    def finish_together(self) -> None:
        """Do after the last step what needs all workers, while they are there. Raises as collectives do."""

    def hand_over(self) -> bool:
        """Before some workers leave: give to others what only they have. False: not now, the group is lost."""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all workers."""

    def state_dict(self) -> State: ...

    def state_for_newcomers(self) -> State: ...

    def copy_state(self) -> Encoded: ...

    def take_state(self, state: State) -> None: ...

    def take_over(self, state: State) -> None: ...

    def count_evaluation(self, result: dict[str, float]) -> None: ...

    def save(self) -> None: ...

    def load_save(self) -> bool: ...

    def begin_attempt(self) -> None: ...
