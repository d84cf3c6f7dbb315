"""Workers under agents that heal: how a worker gets a seat in the next round, through the job's store.

Owns the conversation with the store (see ``_seats`` for the rules and ``phalanx.membership`` for the agents' keys).
Workers' own keys: ``elastic/G/ready/ID``, ``elastic/G/leaving``, ``elastic/G/round/R``, ``elastic/G/crossed/R/ID``,
``elastic/evaluation/N`` and ``elastic/done``. Each generation has its own; nothing of an earlier one is ever read. All
are records that one worker writes, none is a counter, so that the job's secret covers them; a worker that waits for a
seat writes its own again if somebody deleted them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping

from phalanx import membership
from phalanx.comm import Group, init
from phalanx.comm.stores import Store, connect, job_store
from phalanx.comm.stores._sealed import signed_store
from phalanx.elastic._roster import (
    Ejected,
    EvaluationKnown,
    FixedRoster,
    JobOver,
    RegroupTimeout,
    Roster,
    ToldToLeave,
)
from phalanx.elastic._seats import Ready, Round, Seat, choose_round
from phalanx.elastic._watcher import (
    PROGRESS_EVERY,
    Signals,
    Watcher,
    any_leaving_key,
    ready_key,
    report_progress,
)
from phalanx.errors import CommError, PeerLost
from phalanx.world import World

DONE_KEY = "elastic/done"
LEAVE_AFTER = 2.0
"""Seconds that a worker with a state waits on for a seat when it was told to leave: there it could leave politely, but
when all workers were told to, no seat comes any more."""


class StoreRoster:
    """Workers under agents that heal: members come and go from generation to generation."""

    can_change = True

    def __init__(
        self,
        store: Store,
        job: str,
        worker_id: str,
        generation: int,
        *,
        timeout: float = 600.0,
        comm_timeout: float,
    ) -> None:
        self.worker_id = worker_id
        self.signals = Signals()
        self.should_leave: Callable[[], bool] = lambda: False
        self.job = job
        self.timeout = timeout
        self.comm_timeout = comm_timeout
        self._first = generation
        self._groups = signed_store(store, job)
        self._store = job_store(store, job)
        self._watcher: Watcher | None = None

    # -- seats ------------------------------------------------------------------------------------------------

    def first_seat(self, mine: Ready) -> Seat:
        return self._take_seat(self._first, mine)

    def seat_after_loss(self, seat: Seat, mine: Ready, cause: CommError) -> Seat:
        self._stop_watching()
        if seat.group is not None:
            seat.group.abort(cause)
        self._make_sure_broken(seat, cause)
        return self._take_seat(seat.generation + 1, mine)

    def seat_at_boundary(self, seat: Seat, mine: Ready) -> Seat:
        self._stop_watching()
        generation = seat.generation
        self._store.set(_crossed_key(seat, self.worker_id), b"1")
        if seat.rank == 0:
            self._close_round(seat)
        found = self._take_seat(generation, mine, first_round=seat.round + 1, declared=True)
        if seat.group is not None:
            seat.group.close()
        return found

    def _close_round(self, seat: Seat) -> None:
        """Say what follows this round: another one with those who are ready, or the next generation."""
        g = seat.generation
        members = self._members(g)
        wanted, *leaving = self._store.get_many(
            [membership.wanted_key(g), *(membership.leaving_key(g, worker) for worker in seat.workers)]
        )
        if wanted is not None or any(key is not None for key in leaving):
            following = Round(move_to=g + 1)
        else:
            ready = self._ready(g, members)
            following = Round(tuple(w for w in members if w in ready or w in seat.workers))
        self._store.compare_and_set(_round_key(g, seat.round + 1), None, following.to_json())

    def _take_seat(
        self, generation: int, mine: Ready, *, first_round: int = 0, declared: bool = False
    ) -> Seat:
        """Wait for a round with this worker in it and join its group; move on when a generation breaks."""
        round_ = first_round
        told_at: float | None = None

        def report(count: int) -> None:
            nonlocal told_at
            report_progress(self._store, self.worker_id, mine.step, 0, count)
            if self.should_leave():
                told_at = told_at or time.monotonic()
                if not mine.is_veteran or time.monotonic() - told_at > LEAVE_AFTER:
                    self._store.set(membership.leaving_key(generation, self.worker_id), b"1")
                    raise ToldToLeave(f"worker {self.worker_id} leaves before generation {generation}")

        wait = _Wait(self.timeout, report)
        while True:
            done, evaluated, broken, members, record, own = self._store.get_many(
                [
                    DONE_KEY,
                    _evaluation_key(mine.evaluations),
                    membership.broken_key(generation),
                    membership.members_key(generation),
                    _round_key(generation, round_),
                    ready_key(generation, self.worker_id),
                ]
            )
            if done is not None and not mine.evaluating:
                raise JobOver(f"worker {self.worker_id}: the other workers have finished job {self.job!r}")
            if mine.evaluating and evaluated is not None:
                raise EvaluationKnown(json.loads(evaluated))
            found = Round.from_json(record) if record is not None else None
            if broken is not None or (found is not None and found.move_to is not None):
                generation, round_, declared = generation + 1, 0, False
                continue
            if members is None:
                wait.a_little(f"the members of generation {generation}")
                continue
            ids = tuple(member.id for member in membership.Members.from_json(members).workers)
            if self.worker_id not in ids:
                raise Ejected(
                    f"worker {self.worker_id} is not among the members of generation {generation} of job "
                    f"{self.job!r}: {', '.join(ids)}"
                )
            if not declared or own is None:
                self._store.set(ready_key(generation, self.worker_id), mine.to_json())
                declared = True
            elif found is not None and self.worker_id in found.workers:
                seat = self._join(generation, round_, found.workers, ids)
                if seat is not None:
                    return seat
                wait.a_little(f"generation {generation} to break")
            elif found is not None:
                round_ += 1
            else:
                choice = choose_round(ids, self._ready(generation, ids)) if round_ == 0 else None
                if choice is not None and choice[0] == self.worker_id:
                    key = _round_key(generation, round_)
                    self._store.compare_and_set(key, None, choice[1].to_json())
                else:
                    wait.a_little(f"a seat in generation {generation}, round {round_}")

    def _join(
        self, generation: int, round_: int, workers: tuple[str, ...], members: tuple[str, ...]
    ) -> Seat | None:
        """Form the group of a round; None when a worker of it was lost meanwhile."""
        rank = workers.index(self.worker_id)
        group: Group | None = None
        if len(workers) > 1:
            try:
                group = Group.create(
                    self._groups.namespace(f"round/{round_}"),
                    rank,
                    len(workers),
                    timeout=self.comm_timeout,
                    job=self.job,
                    generation=generation,
                    interrupt=lambda: self._look_while_joining(generation, round_, workers),
                )
            except CommError as error:
                self._make_sure_broken(Seat(generation, round_, workers, rank, None), error)
                return None
        seat = Seat(generation, round_, workers, rank, group)
        self.signals = Signals()
        absent = tuple(worker for worker in members if worker not in workers)
        self._watcher = Watcher(self._store.clone(), seat, self.worker_id, self.signals, absent)
        self._watcher.start()
        return seat

    # -- the store --------------------------------------------------------------------------------------------

    def _members(self, generation: int) -> tuple[str, ...]:
        (data,) = self._store.wait([membership.members_key(generation)], self.timeout)
        return tuple(member.id for member in membership.Members.from_json(data).workers)

    def _ready(self, generation: int, workers: tuple[str, ...]) -> dict[str, Ready]:
        found = self._store.get_many([ready_key(generation, worker) for worker in workers])
        return {w: Ready.from_json(data) for w, data in zip(workers, found, strict=True) if data is not None}

    def _look_while_joining(self, generation: int, round_: int, workers: tuple[str, ...]) -> PeerLost | None:
        """Why there is no use in waiting for the others, if so. They find the round by its record: it has to stay."""
        round_key = _round_key(generation, round_)
        data, record = self._store.get_many([membership.broken_key(generation), round_key])
        if data is None:
            if record is None:
                self._store.compare_and_set(round_key, None, Round(workers).to_json())
            return None
        reason = membership.Broken.from_json(data).reason
        return PeerLost(f"generation {generation} is over: {reason}", generation=generation)

    def _make_sure_broken(self, seat: Seat, cause: CommError, grace: float = 2.0) -> None:
        """Agents break a generation when they see a death. What only workers can see, they have to tell."""
        key = membership.broken_key(seat.generation)
        until = time.monotonic() + grace
        while time.monotonic() < until:
            if any(found is not None for found in self._store.get_many([key, DONE_KEY])):
                return
            time.sleep(0.005)
        broken = membership.Broken(reason=f"worker {self.worker_id} lost contact: {cause}")
        self._store.compare_and_set(key, None, broken.to_json())

    # -- leaving and progress ---------------------------------------------------------------------------------

    def announce_leaving(self, seat: Seat) -> None:
        self._store.set(membership.leaving_key(seat.generation, self.worker_id), b"1")
        self._store.set(any_leaving_key(seat.generation), b"1")

    def step_aside(self, seat: Seat, patience: float = 20.0) -> None:
        self._stop_watching()
        self._store.compare_and_set(
            _round_key(seat.generation, seat.round + 1), None, Round(move_to=seat.generation + 1).to_json()
        )
        self._store.set(_crossed_key(seat, self.worker_id), b"1")
        until = time.monotonic() + patience
        missing = [worker for worker in seat.workers if worker != self.worker_id]
        while missing and time.monotonic() < until:
            broken, *crossed = self._store.get_many(
                [membership.broken_key(seat.generation), *(_crossed_key(seat, worker) for worker in missing)]
            )
            if broken is not None:
                return
            missing = [worker for worker, record in zip(missing, crossed, strict=True) if record is None]
            time.sleep(0.002)

    def declare_done(self) -> None:
        self._store.set(DONE_KEY, b"1")

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        self._store.set(_evaluation_key(number), json.dumps(result).encode())

    def is_over_after(self, seat: Seat, cause: CommError) -> bool:
        self._make_sure_broken(seat, cause)
        return self._store.get(DONE_KEY) is not None

    def report(self, step: int) -> None:
        if self._watcher is not None:
            self._watcher.progress = (step, self._watcher.progress[1] + 1)

    def waiting(self, is_waiting: bool) -> None:
        if self._watcher is not None:
            self._watcher.is_waiting = is_waiting

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None

    def close(self) -> None:
        self._stop_watching()


class _Wait:
    """Short sleeps that grow, up to a deadline; ``report`` is called now and then with a growing number."""

    def __init__(self, timeout: float, report: Callable[[int], None]) -> None:
        self.timeout = timeout
        self._report = report
        self._began = self._reported = time.monotonic()
        self._sleep = 0.002
        self._count = 0

    def a_little(self, what: str) -> None:
        now = time.monotonic()
        if now - self._began > self.timeout:
            raise RegroupTimeout(
                f"waited {self.timeout:g} s for {what}; are there fewer workers than the minimum?"
            )
        if now - self._reported > PROGRESS_EVERY:
            self._count += 1
            self._reported = now
            self._report(-self._count)
        time.sleep(self._sleep)
        self._sleep = min(self._sleep * 1.2, 0.05)


def make_roster(
    group: Group | None, environ: Mapping[str, str] = os.environ, *, comm_timeout: float
) -> Roster:
    """The roster for where this process runs."""
    world = World.from_env(environ)
    worker_id = environ.get(membership.ENV_WORKER_ID) or f"rank{group.rank if group else world.rank}"
    if group is not None:
        return FixedRoster(group, worker_id)
    url = environ.get(membership.ENV_STORE)
    if url and environ.get(membership.ENV_ON_FAILURE) == "heal":
        job = environ.get(membership.ENV_JOB) or world.job
        return StoreRoster(connect(url), job, worker_id, world.generation, comm_timeout=comm_timeout)
    return FixedRoster(init(default=False) if world.size > 1 else None, worker_id)


def _crossed_key(seat: Seat, worker: str) -> str:
    """Present when the worker has committed the last step of a round."""
    return f"elastic/{seat.generation}/crossed/{seat.round}/{worker}"


def _evaluation_key(number: int) -> str:
    return f"elastic/evaluation/{number}"


def _round_key(generation: int, round_: int) -> str:
    return f"elastic/{generation}/round/{round_}"
