"""How a worker finds the others: the interface, its errors, and the roster of workers that cannot change.

Two implementations: ``FixedRoster`` here, for one process or a group that is restarted as a whole, and ``StoreRoster``
for workers under agents that heal. ``make_roster`` there picks by the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.comm import Group
from phalanx.elastic._seats import Ready, Seat
from phalanx.elastic._watcher import Signals
from phalanx.errors import CommError, PhalanxError


class Ejected(PhalanxError):
    """The job goes on without this worker; the process should end."""


class JobOver(PhalanxError):
    """The other workers have finished the job; there is nothing left to do for this one."""


class ToldToLeave(PhalanxError):
    """This worker was told to leave while it waited for a seat; it has told its agent that it goes."""


class EvaluationKnown(PhalanxError):
    """The others have completed the evaluation that this worker was cut off from; ``result`` is theirs."""

    def __init__(self, result: dict[str, float]) -> None:
        super().__init__("the others have completed this evaluation")
        self.result = result


class RegroupTimeout(PhalanxError, TimeoutError):
    """No generation with this worker in it was agreed on in time."""


class Roster(Protocol):
    worker_id: str
    can_change: bool
    """Whether workers can come and go while the job runs."""
    signals: Signals
    """What the outside world wants of this worker in its current seat."""
    should_leave: Callable[[], bool]
    """Asked while waiting for a seat: whether this worker was told to leave."""

    def first_seat(self, mine: Ready) -> Seat: ...

    def seat_after_loss(self, seat: Seat, mine: Ready, cause: CommError) -> Seat:
        """A seat in a later generation, after a worker of this one was lost."""

    def seat_at_boundary(self, seat: Seat, mine: Ready) -> Seat:
        """The next seat when all workers of this one have agreed to regroup; the old group still works."""

    def announce_leaving(self, seat: Seat) -> None: ...

    def step_aside(self, seat: Seat) -> None:
        """Called by a leaving worker at its last boundary: returns when the others have crossed it too.

        Were it to exit before, they would take it for dead and drop the step that they are just committing.
        """

    def declare_done(self) -> None:
        """All workers have committed the last step."""

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        """Leave the result for a worker that was cut off just before it had it."""

    def is_over_after(self, seat: Seat, cause: CommError) -> bool:
        """Whether a loss while waiting for the others' end only means that they have ended."""

    def report(self, step: int) -> None:
        """Progress, for whoever looks for hangs."""

    def waiting(self, is_waiting: bool) -> None:
        """Whether this worker waits for others, and so cannot progress by itself."""

    def close(self) -> None: ...


class FixedRoster:
    """A set of workers that cannot change: one process, or a launcher that restarts all of them together."""

    can_change = False

    def __init__(self, group: Group | None, worker_id: str) -> None:
        self.worker_id = worker_id
        self.signals = Signals()
        self.should_leave: Callable[[], bool] = lambda: False
        self._group = group

    def first_seat(self, mine: Ready) -> Seat:
        group = self._group
        if group is None or group.size == 1:
            return Seat(0, 0, (self.worker_id,), 0, None)
        return Seat(group.generation, 0, tuple(f"rank{r}" for r in range(group.size)), group.rank, group)

    def seat_after_loss(self, seat: Seat, mine: Ready, cause: CommError) -> Seat:
        raise cause  # nobody here can replace a worker: whoever started them restarts all

    def seat_at_boundary(self, seat: Seat, mine: Ready) -> Seat:
        return seat  # a polite leave of one worker of a fixed group is the end of it for all

    def announce_leaving(self, seat: Seat) -> None:
        pass

    def step_aside(self, seat: Seat) -> None:
        pass

    def declare_done(self) -> None:
        pass

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        pass

    def is_over_after(self, seat: Seat, cause: CommError) -> bool:
        return True  # this worker has committed all steps, and those of the others that have not are not helped by it

    def report(self, step: int) -> None:
        pass

    def waiting(self, is_waiting: bool) -> None:
        pass

    def close(self) -> None:
        pass
