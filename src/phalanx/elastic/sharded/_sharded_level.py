"""Brings the workers of a new round of a sharded job to one version, with as few bytes as possible.

Phases: 1. everybody tells how far it is and which cells it has (one small gather); 2. a pure choice
(``_recovery_choice``); 3. who is behind rolls the prepared step forward, or all drop it; who is new takes the small
state, and no cells: those come in slices while everybody trains (``_slices``). If cells are lost, all take the last
save.

A worker that fails meanwhile makes the whole round fail. Cells change hands in ``settle`` only, which is the last thing
here and has no collective; so whatever is claimed in the next round is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.elastic.membership._coordinator import Coordinator, ResultLost
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._sync import check_same, fingerprint, go_back
from phalanx.elastic.sharded._assignment import assign, trimmed
from phalanx.elastic.sharded._cell_reports import tell_holdings, tell_protection
from phalanx.elastic.sharded._first_cells import make_cells
from phalanx.elastic.sharded._recovery_choice import Repeat, Resume, RollForward, StateReport, choose_recovery
from phalanx.elastic.sharded._verdict import StepVerdict
from phalanx.elastic.tools._step_clock import StepClock
from phalanx.errors import PhalanxError
from phalanx.events._event_types import StateReceived, StateSent
from phalanx.protocol import FRESH

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding

Told = dict[str, Any]


class CellsLost(PhalanxError):
    """Cells were lost before the first save. What the job began with is known to new processes only."""


def _tell_waiting(coordinator: Coordinator, clock: StepClock, is_waiting: bool) -> None:
    coordinator.waiting(is_waiting)
    clock.turn(is_waiting)


def bring_level(sharding: JobSharding, coordinator: Coordinator, membership: Membership) -> None:
    """Make this worker part of the round. Raises as collectives do."""
    job, group, rank = sharding.job, sharding.everyone, membership.rank
    job.saving.give_up()
    sharding.passes.tell_waiting = partial(_tell_waiting, coordinator, sharding.job.clock)
    sharding.objects.convert()
    told: list[Told] = group.all_gather_values(_report(sharding, membership))
    check_same(membership, told, job)
    job.regrouping.choose_writer(membership, [one["came"] for one in told])
    workers = membership.workers
    sharding.nodes = {worker: one["node"] or worker for worker, one in zip(workers, told, strict=True)}
    choice = _choose(sharding, workers, told)
    if isinstance(choice, Resume):
        _check_loss(sharding, choice)
    sharding.form_tensor_groups([one["lane"] for one in told], [one["host"] for one in told])
    if isinstance(choice, Resume):
        _resume(sharding, coordinator, membership, told, choice)
        return
    source = next(r for r, one in enumerate(told) if one["step"] == choice.version)
    behind = [workers.index(worker) for worker in choice.behind] if isinstance(choice, RollForward) else []
    if rank == source:
        for other in behind:
            send_state(group, job.state_dict(), other)
    elif rank in behind:
        ahead = receive_state(group, source)  # first, so that nothing has changed here if that fails
        sharding.roll_forward(StepVerdict.from_json(told[source]["verdict"]), ahead)
    job.attempt = told[source]["attempt"]  # each may have loaded the same state by itself
    _fill_newcomers(sharding, membership, told, source)
    sharding.forget_model()  # of one that came after the last step and holds nothing
    most = max(told, key=lambda one: int(one["evaluations"][0]))["evaluations"]
    if most[0] > job.num_evaluations:
        job.count_evaluation(most[1])  # it was cut off from an evaluation that the others completed
    sharding.settle(trimmed(sharding.table, choice.holdings, sharding.workers, sharding.copies))
    sharding.slices.begin(job.step)
    tell_holdings(sharding)
    if job.run.verify:
        sharding.verify()


def _report(sharding: JobSharding, membership: Membership) -> Told:
    job, step = sharding.job, sharding.step
    prepared = step.number if step is not None and step.numbers is not None else None
    held = sharding.store.held if sharding.has_cells else ()
    owned = () if sharding.holdings is None else sharding.holdings.owned_by(sharding.me)
    return {
        "step": FRESH if job.is_fresh else job.step,
        "job": job.identity(),
        "machine": fingerprint(job.model),
        "evaluations": [job.num_evaluations, job.last_evaluation],
        "attempt": job.attempt,
        "came": job.regrouping.came_at(membership),
        "prepared": prepared,
        "held": list(held),
        "owned": sorted(set(owned) & set(held)),
        "verdict": None if sharding.last_verdict is None else sharding.last_verdict.to_json(),
        "node": sharding.node,
        "host": sharding.host,
        "lane": 0 if sharding.tensor_groups is None else sharding.tensor_groups.lane,
    }


def _choose(sharding: JobSharding, workers: Sequence[str], told: Sequence[Told]) -> RollForward | Repeat | Resume:
    """Return what this worker's lane does. Versions are those of all; if any lane has lost cells, all resume."""
    num_lanes = 1 if sharding.tensor_groups is None else sharding.tensor_groups.num_lanes
    choices = [
        choose_recovery([_read(w, one, lane) for w, one in zip(workers, told, strict=True)], len(sharding.table))
        for lane in range(num_lanes)
    ]
    lost = next((choice for choice in choices if isinstance(choice, Resume)), None)
    return lost or choices[0 if sharding.tensor_groups is None else sharding.tensor_groups.lane]


def _read(worker: str, one: Told, lane: int) -> StateReport:
    if one["step"] == FRESH:
        return StateReport(worker)
    if one["lane"] != lane:
        return StateReport(worker, one["step"], one["prepared"])
    return StateReport(worker, one["step"], one["prepared"], tuple(one["held"]), tuple(one["owned"]))


def _fill_newcomers(sharding: JobSharding, membership: Membership, told: Sequence[Told], source: int) -> None:
    """Give the small state to those who have none; cells come later."""
    job, group = sharding.job, sharding.everyone
    new = [rank for rank, one in enumerate(told) if one["step"] == FRESH and rank != source]
    if membership.rank == source:
        for rank in new:
            size = send_state(group, job.state_dict(), rank)
            job.events.write(StateSent(to=membership.workers[rank], bytes=size))
    elif membership.rank in new:
        job.take_over(receive_state(group, source))
        job.events.write(StateReceived(step=job.step, source=membership.workers[source]))
        sharding.forget_model()


def _check_loss(sharding: JobSharding, choice: Resume) -> None:
    """Raise if cells are lost and there is no way back."""
    if choice.version is None:
        return
    if sharding.job.regrouping.is_over:
        raise ResultLost(
            f"{sharding.describe_loss(choice)}, after the last step. The newest save of the job is what is left of it"
        )
    sharding.check_saves(choice)


def _resume(
    sharding: JobSharding, coordinator: Coordinator, membership: Membership, told: Sequence[Told], choice: Resume
) -> None:
    """Begin at the last save, or at the beginning if nobody has begun yet."""
    job, group = sharding.job, sharding.everyone
    saved = job.saving.agree(group.rank, group.size, group.all_gather_values)
    before = max([choice.version or 0, *group.all_gather_values(coordinator.committed_steps.num_committed())])
    cause = "all workers were lost" if choice.version is None else sharding.describe_loss(choice)
    if saved is None and choice.version is not None:
        raise CellsLost(f"{cause}, and there is no save yet to go back to: this worker ends, and new ones begin anew")
    go_back(job, coordinator, membership, before, 0 if saved is None else saved.step, cause)
    holdings = assign(sharding.table, sharding.workers, sharding.copies, sharding.nodes)
    if saved is None:
        if membership.rank == 0:
            job.begin_attempt()
        _fill_all(sharding, membership)
        make_cells(sharding, holdings)
        if sharding.tensor_groups is not None:
            sharding.digest()  # which compares what should be the same in all lanes
    else:
        sharding.load_save(saved, holdings)
    sharding.slices.begin(job.step)
    tell_holdings(sharding)
    tell_protection(sharding)


def _fill_all(sharding: JobSharding, membership: Membership) -> None:
    """Give rank 0's small state to all: scripts may have built their objects differently."""
    job, group = sharding.job, sharding.everyone
    if membership.rank == 0:
        for rank in range(1, group.size):
            send_state(group, job.state_dict(), rank)
    else:
        job.take_over(receive_state(group, 0))
