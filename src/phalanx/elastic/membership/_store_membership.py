"""Workers under agents that heal: how a worker gets a seat in the next round, through the job's store.

Owns the conversation with the store until the last step (see ``_seats`` for the rules, ``_keys`` for the workers' own
keys and ``phalanx.protocol`` for the agents'); what comes after it is in ``_keeper``. A worker that waits for a seat
writes its own records again if somebody deleted them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping

from phalanx import protocol
from phalanx._fields import load_json, short
from phalanx.comm import Group, init
from phalanx.comm.stores import Store, connect, job_store
from phalanx.comm.stores._sealed import signed_store
from phalanx.elastic.membership._committed_steps import Ledger
from phalanx.elastic.membership._final_state import Contact, Encoded, Keeper, TakenOver, take_over
from phalanx.elastic.membership._finish import Finish
from phalanx.elastic.membership._interface import (
    Ejected,
    EvaluationKnown,
    FixedRoster,
    JobOver,
    RegroupTimeout,
    Roster,
    ToldToLeave,
)
from phalanx.elastic.membership._keys import Keys
from phalanx.elastic.membership._rounds import Ready, Round, Seat, awaited_veterans, choose_round
from phalanx.elastic.membership._store_monitor import PROGRESS_EVERY, Signals, Watcher, report_progress
from phalanx.errors import CommError, PeerLost, PeerTimeout
from phalanx.protocol import RecordError
from phalanx.world import World

TELL_AFTER = 0.1
"""Seconds after which a loss that no agent has explained is told to them: a death is noticed sooner."""
BREAK_AFTER = 3.0
"""Seconds after which, should the agents not have done so, a worker breaks the generation for the others."""
STALE_AFTER = 10.0
"""Seconds after which a generation that has a successor is over for one without a seat, though no record says so."""
KEEPS_AFTER = 5.0
"""Seconds in which a worker whose script has ended, if its process lives, says that it keeps the final state."""
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
        keys: Keys = Keys(),  # noqa: B008  # a frozen value
    ) -> None:
        self.worker_id = worker_id
        self.signals = Signals()
        self.should_leave: Callable[[], bool] = lambda: False
        self.job = job
        self.timeout = timeout
        self.comm_timeout = comm_timeout
        self.keys = keys
        self.generation = generation
        """The one that this worker was born in, then that of its newest seat."""
        self._groups = signed_store(store, job)
        self._store = job_store(store, job)
        self.ledger = Ledger(self._store, keys)
        self._contact = Contact(
            store=self._store,
            root=self._groups,
            keys=keys,
            job=job,
            worker_id=worker_id,
            timeout=timeout,
            comm_timeout=comm_timeout,
        )
        self._say_that_it_regroups()
        self._watcher: Watcher | None = None
        self._keeper: Keeper | None = None
        self._has_noted = False

    # -- seats ------------------------------------------------------------------------------------------------

    def first_seat(self, mine: Ready) -> Seat:
        if self.keys.number:  # the script goes on with another job: what follows the last one is a loop again
            self._store.compare_and_set(protocol.FINISHING, str(self.keys.number - 1).encode(), b"")
        return self._take_seat(self.generation, mine)

    def rejoin(self, generation: int, mine: Ready) -> Seat:
        return self._take_seat(generation, mine)

    def seat_after_loss(self, seat: Seat, mine: Ready, cause: CommError) -> Seat:
        self._stop_watching()
        if seat.group is not None:
            seat.group.abort(cause)
        self._make_sure_broken(seat, cause, mine.step, evaluating=mine.evaluating)
        return self._take_seat(seat.generation + 1, mine)

    def seat_at_boundary(self, seat: Seat, mine: Ready) -> Seat:
        self._stop_watching()
        generation = seat.generation
        self._store.set(self.keys.crossed(seat.generation, seat.round, self.worker_id), b"1")
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
            [protocol.wanted_key(g), *(protocol.leaving_key(g, worker) for worker in seat.workers)]
        )
        if wanted is not None or any(key is not None for key in leaving):
            following = Round(move_to=g + 1)
        else:
            ready = self._ready(g, members)
            following = Round(tuple(w for w in members if w in ready or w in seat.workers))
        self._store.compare_and_set(self.keys.round(g, seat.round + 1), None, following.to_json())

    def _take_seat(
        self, generation: int, mine: Ready, *, first_round: int = 0, declared: bool = False
    ) -> Seat:
        """Wait for a round with this worker in it and join its group; move on when a generation breaks."""
        round_, came = first_round, time.monotonic()
        told_at: float | None = None

        def report(count: int) -> None:
            nonlocal told_at
            report_progress(self._store, self.worker_id, mine.step, 0, count)
            if self.should_leave():
                told_at = told_at or time.monotonic()
                if not mine.is_veteran or time.monotonic() - told_at > LEAVE_AFTER:
                    self._store.set(protocol.leaving_key(generation, self.worker_id), b"1")
                    raise ToldToLeave(f"worker {self.worker_id} leaves before generation {generation}")

        wait, absent = _Wait(self.timeout, report), _Absence(self)
        while True:
            done, evaluated, broken, following, members, record, own, said = self._store.get_many(
                [
                    self.keys.done,
                    self.keys.evaluation(mine.evaluations),
                    protocol.broken_key(generation),
                    protocol.members_key(generation + 1),
                    protocol.members_key(generation),
                    self.keys.round(generation, round_),
                    self.keys.ready(generation, self.worker_id),
                    protocol.regroups_key(self.worker_id),
                ]
            )
            if said is None:
                self._say_that_it_regroups()
            finish = Finish.parse(done)
            if finish is not None and mine.is_veteran and not mine.evaluating:
                raise JobOver(finish, generation)
            if mine.evaluating and evaluated is not None:
                raise EvaluationKnown(parse_evaluation(evaluated))
            found = Round.from_json(record) if record is not None else None
            is_stale = following is not None and time.monotonic() - came > STALE_AFTER
            if broken is not None or is_stale or (found is not None and found.move_to is not None):
                generation, round_, declared, came = generation + 1, 0, False, time.monotonic()
                continue
            self.generation = generation
            if members is None:
                wait.a_little(f"the members of generation {generation}")
                continue
            ids = tuple(member.id for member in protocol.Members.from_json(members).workers)
            if self.worker_id not in ids:
                raise Ejected(
                    f"worker {self.worker_id} is not among the members of generation {generation} of job "
                    f"{self.job!r}: {', '.join(ids)}"
                )
            if not declared or own is None:
                self._declare(generation, mine)
                declared = True
            elif finish is not None and not mine.is_veteran:
                if not self._void(finish, generation, ids, came):
                    wait.a_little(f"the others of generation {generation}, which have done all steps")
            elif found is not None and self.worker_id in found.workers:
                seat = self._join(generation, round_, found.workers, ids, mine)
                if seat is not None:
                    return seat
                wait.a_little(f"generation {generation} to break")
            elif found is not None:
                round_ += 1
            else:
                ready = self._ready(generation, ids) if round_ == 0 else {}
                choice = choose_round(self._awaited(ids, ready, came), ready) if round_ == 0 else None
                absent.look(generation, awaited_veterans(ids, ready), ids, mine)
                if choice is not None and choice[0] == self.worker_id:
                    key = self.keys.round(generation, round_)
                    self._store.compare_and_set(key, None, choice[1].to_json())
                else:
                    wait.a_little(f"a seat in generation {generation}, round {round_}")

    def _void(self, finish: Finish, generation: int, ids: tuple[str, ...], came: float) -> bool:
        """A newcomer finds that all steps are done: ``JobOver`` if a worker that was there lives.

        If none does, the final state is lost: once all have come, and all are new, what they found counts no more
        (True), and they begin as the first workers of a job do, with a save. Until then, False.
        """
        keeps = self._store.get_many([self.keys.keeps(generation, worker) for worker in ids])
        if any(value is not None for value in keeps) or len(self._contact.ended(finish.workers)) == len(
            finish.workers
        ):
            raise JobOver(finish, generation, self._contact.members(generation))
        ready = self._ready(generation, ids)
        is_missing = any(worker not in ready for worker in self._awaited(ids, ready, came))
        if is_missing or any(one.is_veteran for one in ready.values()):
            return False
        if Finish.parse(self._store.get(self.keys.done)) == finish:
            self._store.delete(self.keys.done)
            self._store.delete(protocol.FINISHING)
        return True

    def _awaited(self, ids: tuple[str, ...], ready: Mapping[str, Ready], came: float) -> tuple[str, ...]:
        """The members of a generation without those that will not come any more: their scripts have ended.

        One that still lives keeps the final state, and has its time to say so: ``came`` is when this worker came.
        """
        if time.monotonic() - came < KEEPS_AFTER:
            return ids
        ended = self._contact.ended([worker for worker in ids if worker not in ready])
        return tuple(worker for worker in ids if worker not in ended)

    def _join(
        self,
        generation: int,
        round_: int,
        workers: tuple[str, ...],
        members: tuple[str, ...],
        mine: Ready,
    ) -> Seat | None:
        """Form the group of a round; None when a worker of it was lost meanwhile."""
        rank = workers.index(self.worker_id)
        group: Group | None = None
        if len(workers) > 1:
            try:
                group = Group.create(
                    self._groups.namespace(self.keys.group(round_)),
                    rank,
                    len(workers),
                    timeout=self.comm_timeout,
                    job=self.job,
                    generation=generation,
                    interrupt=lambda: self._look_while_joining(generation, round_, workers),
                )
            except CommError as error:
                self._make_sure_broken(Seat(generation, round_, workers, rank, None), error, mine.step)
                return None
        seat = Seat(generation, round_, workers, rank, group)
        self.signals = Signals()
        absent = tuple(worker for worker in members if worker not in workers)
        self._watcher = Watcher(self._store.clone(), self.keys, seat, self.worker_id, self.signals, absent)
        self._watcher.start()
        return seat

    # -- the store --------------------------------------------------------------------------------------------

    def _say_that_it_regroups(self) -> None:
        self._store.set(protocol.regroups_key(self.worker_id), b"1")

    def _declare(self, generation: int, mine: Ready) -> None:
        if (
            mine.is_veteran
        ):  # what it has committed since its last report is progress, should workers die again
            report_progress(self._store, self.worker_id, mine.step, 0, 0)
        self._store.set(self.keys.ready(generation, self.worker_id), mine.to_json())

    def _members(self, generation: int) -> tuple[str, ...]:
        (data,) = self._store.wait([protocol.members_key(generation)], self.timeout)
        return tuple(member.id for member in protocol.Members.from_json(data).workers)

    def _ready(self, generation: int, workers: tuple[str, ...]) -> dict[str, Ready]:
        found = self._store.get_many([self.keys.ready(generation, worker) for worker in workers])
        return {w: Ready.from_json(data) for w, data in zip(workers, found, strict=True) if data is not None}

    def _look_while_joining(self, generation: int, round_: int, workers: tuple[str, ...]) -> PeerLost | None:
        """Why there is no use in waiting for the others, if so. They find the round by its record: it has to stay."""
        lost = self._contact.broken(generation)
        if lost is None and self._store.get(self.keys.round(generation, round_)) is None:
            self._store.compare_and_set(self.keys.round(generation, round_), None, Round(workers).to_json())
        return lost

    def _make_sure_broken(
        self, seat: Seat, cause: CommError, step: int = -1, *, evaluating: bool = False
    ) -> None:
        """Agents break a generation when they see a death. What only workers see they tell the agents, which break it;
        where these cannot, since they form the next one already, this worker tells the others by itself."""
        key = protocol.broken_key(seat.generation)
        began, has_told = time.monotonic(), False
        while (waited := time.monotonic() - began) < BREAK_AFTER:
            is_broken, is_done = (data is not None for data in self._store.get_many([key, self.keys.done]))
            if is_broken or (is_done and not evaluating):
                return
            if waited > TELL_AFTER and not has_told:
                self._tell_lost_contact(seat, cause, step)
                has_told = True
            time.sleep(0.005)
        broken = protocol.Broken(reason=f"worker {self.worker_id} lost contact: {cause}", at_once=True)
        self._store.compare_and_set(key, None, broken.to_json())

    def _tell_lost_contact(self, seat: Seat, cause: CommError, step: int) -> None:
        ranks = getattr(cause, "ranks", ()) or getattr(cause, "suspects", ())
        self.tell_agents(
            seat.generation,
            protocol.LostContact(
                by=self.worker_id,
                of=tuple(seat.workers[rank] for rank in ranks if rank < len(seat.workers)),
                late=isinstance(cause, PeerTimeout),
                peers=seat.workers,
                step=step,
                reason=(str(cause).splitlines() or [""])[0][:300],
            ),
        )

    def tell_agents(self, generation: int, word: protocol.LostContact) -> None:
        """First what is said, then that something is: agents look at that last key only."""
        self._say_that_it_regroups()  # they are about to ask
        self._store.set(protocol.contact_key(generation, self.worker_id), word.to_json())
        self._store.set(protocol.any_contact_key(generation), b"1")

    # -- leaving and progress ---------------------------------------------------------------------------------

    def announce_leaving(self, seat: Seat) -> None:
        self._store.set(protocol.leaving_key(seat.generation, self.worker_id), b"1")
        self._store.set(self.keys.leaving(seat.generation), b"1")

    def step_aside(self, seat: Seat, patience: float = 20.0) -> None:
        self._stop_watching()
        self._store.compare_and_set(
            self.keys.round(seat.generation, seat.round + 1),
            None,
            Round(move_to=seat.generation + 1).to_json(),
        )
        self._store.set(self.keys.crossed(seat.generation, seat.round, self.worker_id), b"1")
        until = time.monotonic() + patience
        missing = [worker for worker in seat.workers if worker != self.worker_id]
        while missing and time.monotonic() < until:
            keys = [self.keys.crossed(seat.generation, seat.round, worker) for worker in missing]
            broken, *crossed = self._store.get_many([protocol.broken_key(seat.generation), *keys])
            if broken is not None:
                return
            missing = [worker for worker, record in zip(missing, crossed, strict=True) if record is None]
            time.sleep(0.002)

    def declare_done(self, seat: Seat, step: int) -> Finish:
        finish = Finish.of(seat, step, self._contact.members(seat.generation) or {})
        self._store.compare_and_set(self.keys.done, None, finish.to_json())  # the others write the same
        self._store.set(protocol.FINISHING, str(self.keys.number).encode())
        self._store.set(self.keys.committed, str(step).encode())
        return finish

    def finish_after(self, seat: Seat, cause: CommError, step: int) -> Finish | None:
        self._make_sure_broken(seat, cause)
        return Finish.parse(self._store.get(self.keys.done))

    def keep(self, finish: Finish, rank: int, generation: int, state: Encoded | None) -> Keeper | None:
        self._keeper = Keeper(self._contact.clone(), finish, rank, generation, state)
        return self._keeper

    @property
    def newest_generation(self) -> int:
        """The newest one that this worker knows of, during the loop or after it."""
        return self.generation if self._keeper is None else self._keeper.generation

    def take_over(self, over: JobOver) -> TakenOver | None:
        return take_over(self._contact, over.finish, over.generation, over.members)

    def note_commit(self, seat: Seat, step: int) -> None:
        if seat.rank != 0:
            return
        if self._watcher is None or not self._has_noted:
            self._has_noted = True
            self.ledger.note(step)
        else:
            self._watcher.committed = step

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        self._store.set(self.keys.evaluation(number), json.dumps(result).encode())

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


class _Absence:
    """Tells the agents of workers with a state that are members and do not come for as long as a group's timeout."""

    def __init__(self, roster: StoreRoster) -> None:
        self._roster = roster
        self._seen: tuple[int, tuple[str, ...]] = (-1, ())
        self._since = 0.0

    def look(self, generation: int, absent: tuple[str, ...], members: tuple[str, ...], mine: Ready) -> None:
        roster, now = self._roster, time.monotonic()
        if (generation, absent) != self._seen:
            self._seen, self._since = (generation, absent), now
        if not absent or now - self._since < roster.comm_timeout:
            return
        self._since = now
        reason = f"waited {roster.comm_timeout:g} s for {', '.join(absent)} to join generation {generation}"
        roster.tell_agents(
            generation,
            protocol.LostContact(
                by=roster.worker_id,
                of=absent,
                late=True,
                peers=(roster.worker_id, *absent),
                step=mine.step,
                reason=reason,
            ),
        )


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
    worker_id = environ.get(protocol.ENV_WORKER_ID) or f"rank{group.rank if group else world.rank}"
    if group is not None:
        return FixedRoster(group, worker_id)
    url = environ.get(protocol.ENV_STORE)
    if not url:
        return FixedRoster(init(default=False) if world.size > 1 else None, worker_id)
    job = environ.get(protocol.ENV_JOB) or world.job
    keys = Keys(len(_made))
    if environ.get(protocol.ENV_ON_FAILURE) != "heal":
        _made.append(None)
        ledger = Ledger(job_store(connect(url), job) if world.rank == 0 else None, keys)
        return FixedRoster(init(default=False) if world.size > 1 else None, worker_id, ledger)
    newest = max([world.generation, *(before.newest_generation for before in _made if before is not None)])
    roster = StoreRoster(connect(url), job, worker_id, newest, comm_timeout=comm_timeout, keys=keys)
    _made.append(roster)
    return roster


def parse_evaluation(data: bytes) -> dict[str, float]:
    """The result of an evaluation, means by name; ``RecordError`` when it is none. A mean may be infinite or nan."""
    result = load_json(data, "evaluation record", RecordError)
    if not isinstance(result, dict) or not all(type(value) in (int, float) for value in result.values()):
        raise RecordError(f"evaluation record is {short(result)}; expected numbers by name")
    return result


_made: list[StoreRoster | None] = []
"""The rosters of the jobs that this process has made so far: a job's number is the same in all workers."""
