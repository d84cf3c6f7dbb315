"""Finds the other workers: the interface, its errors, and the coordinator of workers that cannot change.

Two implementations: ``FixedCoordinator`` here, for one process or a group that is restarted as a whole, and
``StoreCoordinator`` for workers under agents that heal. ``_make_coordinator`` picks by the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from phalanx.comm import Group
from phalanx.elastic.membership._committed_steps import CommittedSteps
from phalanx.elastic.membership._finish import finish_of
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._store_monitor import Signals
from phalanx.elastic.tools._step_clock import WorkerPace
from phalanx.errors import CommError, JobStopped, PhalanxError
from phalanx.protocol import Finish, JobKeys, Ready

if TYPE_CHECKING:
    from phalanx.elastic.membership._final_state import Encoded, FinalStateServer, TakenOver


class Ejected(PhalanxError):
    """The job goes on without this worker; the process should end."""


class JobOver(PhalanxError):
    """All steps are done; ``finish`` says by whom. For a newcomer, ``members`` are those of ``generation``, one of
    which has the final state or is known to have none to give."""

    def __init__(self, finish: Finish, generation: int, members: Mapping[str, str] | None = None) -> None:
        super().__init__(f"all {finish.step} steps are done")
        self.finish = finish
        self.generation = generation
        self.members = members or {}


class NothingLeft(PhalanxError):
    """All steps are done, and every rank has a worker that runs what follows them, or has run it."""


class ResultLost(JobStopped):
    """A worker was lost after the last step, and nobody can do what its script does after it."""


class ToldToLeave(PhalanxError):
    """This worker was told to leave while it waited for a place; it has told its agent that it goes."""


class EvaluationKnown(PhalanxError):
    """The others have completed the evaluation that this worker was cut off from; ``result`` is theirs."""

    def __init__(self, result: dict[str, float]) -> None:
        super().__init__("the others have completed this evaluation")
        self.result = result


class RegroupTimeout(PhalanxError, TimeoutError):
    """No generation with this worker in it was agreed on in time."""


class Coordinator(Protocol):
    worker_id: str
    can_change: bool
    """Whether workers can come and go while the job runs."""
    signals: Signals
    """What the outside world wants of this worker in its current place."""
    should_leave: Callable[[], bool]
    """Asked while waiting for a place: whether this worker was told to leave."""
    committed_steps: CommittedSteps

    def join(self, mine: Ready) -> Membership: ...

    def join_after_loss(self, membership: Membership, mine: Ready, cause: CommError) -> Membership:
        """Return a place in a later generation, after a worker of this one was lost."""

    def join_at_boundary(self, membership: Membership, mine: Ready) -> Membership:
        """Return the next place when all workers of this one have agreed to regroup; the old group still works."""

    def rejoin(self, generation: int, mine: Ready) -> Membership:
        """Return a place for one that has none, in this generation or a later one."""

    def announce_leaving(self, membership: Membership) -> None: ...

    def step_aside(self, membership: Membership) -> None:
        """Called by a leaving worker at its last boundary: returns when the others have crossed it too.

        Were it to exit before, they would take it for dead and drop the step that they are just committing.
        """

    def declare_done(self, membership: Membership, step: int) -> Finish:
        """Return all workers of the membership's round have committed the last step."""

    def finish_after(self, membership: Membership, cause: CommError, step: int) -> Finish | None:
        """Return the end, if a loss while waiting for it only means that the others got through."""

    def keep(self, finish: Finish, rank: int, generation: int, state: Encoded | None) -> FinalStateServer | None:
        """Keep the final state for whoever takes the place of another; None where nobody can."""

    def take_over(self, over: JobOver) -> TakenOver | None:
        """Return the place of a worker that was lost after the last step; None when the generation is over first."""

    def note_commit(self, membership: Membership, step: int) -> None:
        """So many steps are committed."""

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        """Leave the result for a worker that was cut off just before it had it."""

    def report(self, step: int, pace: WorkerPace | None = None) -> None:
        """Progress, for whoever looks for hangs, and for people."""

    def waiting(self, is_waiting: bool) -> None:
        """Return whether this worker waits for others, and so cannot progress by itself."""

    def close(self) -> None: ...


class FixedCoordinator:
    """A set of workers that cannot change: one process, or a launcher that restarts all of them together."""

    can_change = False

    def __init__(self, group: Group | None, worker_id: str, committed_steps: CommittedSteps | None = None) -> None:
        self.worker_id = worker_id
        self.signals = Signals()
        self.committed_steps = committed_steps or CommittedSteps(None, JobKeys())
        self.should_leave: Callable[[], bool] = lambda: False
        self._group = group

    def join(self, mine: Ready) -> Membership:
        group = self._group
        if group is None or group.size == 1:
            return Membership(0, 0, (self.worker_id,), 0, None)
        return Membership(group.generation, 0, tuple(f"rank{r}" for r in range(group.size)), group.rank, group)

    def join_after_loss(self, membership: Membership, mine: Ready, cause: CommError) -> Membership:
        raise cause  # nobody here can replace a worker: whoever started them restarts all

    def join_at_boundary(self, membership: Membership, mine: Ready) -> Membership:
        return membership  # a polite leave of one worker of a fixed group is the end of it for all

    def rejoin(self, generation: int, mine: Ready) -> Membership:
        raise AssertionError("in a fixed group nobody is without a place")

    def announce_leaving(self, membership: Membership) -> None:
        pass

    def step_aside(self, membership: Membership) -> None:
        pass

    def declare_done(self, membership: Membership, step: int) -> Finish:
        return finish_of(membership, step, {})

    def finish_after(self, membership: Membership, cause: CommError, step: int) -> Finish | None:
        # This worker has committed all steps, and those of the others that have not are not helped by it.
        return finish_of(membership, step, {})

    def keep(self, finish: Finish, rank: int, generation: int, state: Encoded | None) -> FinalStateServer | None:
        return None

    def take_over(self, over: JobOver) -> TakenOver | None:
        raise AssertionError("nobody joins a fixed group")

    def note_commit(self, membership: Membership, step: int) -> None:
        if membership.rank == 0:
            self.committed_steps.note(step)

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        pass

    def report(self, step: int, pace: WorkerPace | None = None) -> None:
        pass

    def waiting(self, is_waiting: bool) -> None:
        pass

    def close(self) -> None:
        pass
