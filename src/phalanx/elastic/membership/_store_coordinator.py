"""Finds a worker its place in the next round, through the job's store, under agents that heal.

Owns the conversation with the store until the last step (see ``_rounds`` for the rules and ``phalanx.protocol`` for the
keys and records); what comes after it is in ``_final_state``. A worker that waits for its place writes its own records
again if somebody deleted them.

After a loss there are two ways. Where all workers of the round are processes of one host, everybody can see who of
them lives: those write the next round of the same generation themselves and go on, while the agents still find out
(``_join_survivors``); they follow to the next generation at a step boundary. Else, or if the agents were first, they
wait for the generation that the agents form. No worker is ever in two groups, whichever way each of them goes: who
waits in vain for one that went the other way hears of it and follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from phalanx import protocol
from phalanx.comm import Group
from phalanx.comm.failure._identities import identity_record
from phalanx.comm.failure._liveness import own_identity
from phalanx.comm.stores import Store, job_store
from phalanx.comm.stores._polling import slice_after
from phalanx.comm.stores._sealed import signed_store
from phalanx.elastic.membership._committed_steps import CommittedSteps
from phalanx.elastic.membership._coordinator import Ejected, EvaluationKnown, JobOver, ToldToLeave
from phalanx.elastic.membership._final_state import (
    Encoded,
    FinalStateServer,
    StoreAccess,
    TakenOver,
    take_over,
)
from phalanx.elastic.membership._finish import finish_of, parse_finish
from phalanx.elastic.membership._loss_reports import LossReports
from phalanx.elastic.membership._patience import Absence, Wait
from phalanx.elastic.membership._round_processes import (
    declared_identities,
    identities_of,
    processes_of,
    with_processes,
)
from phalanx.elastic.membership._rounds import Membership, awaited_peers, choose_round, convenes
from phalanx.elastic.membership._store_monitor import Signals, StoreMonitor, report_progress
from phalanx.elastic.tools._step_clock import WorkerPace
from phalanx.errors import CommError, PeerLost, StoreTimeout
from phalanx.protocol import (
    PRESENT,
    Evaluation,
    Finish,
    JobKeys,
    ProgressReport,
    Ready,
    Round,
    declared_by,
    dump_count,
    timeouts,
)

AT_ONCE = 64
"""Of how many workers that have yet to cross a boundary the records are waited for in one request."""


class StoreCoordinator:
    """Workers under agents that heal: members come and go from generation to generation."""

    can_change = True

    def __init__(
        self,
        store: Store,
        job: str,
        worker_id: str,
        generation: int,
        *,
        timeout: float = timeouts.regroup_timeout(),
        comm_timeout: float,
        keys: JobKeys = JobKeys(),  # noqa: B008  # a frozen value
    ) -> None:
        self.worker_id = worker_id
        self.signals = Signals()
        self.should_leave: Callable[[], bool] = lambda: False
        self.job = job
        self.timeout = timeout
        self.comm_timeout = comm_timeout
        self.keys = keys
        self.generation = generation
        """The one that this worker was born in, then that of its newest place."""
        self._groups = signed_store(store, job)
        self._store = job_store(store, job)
        self.committed_steps = CommittedSteps(self._store, keys)
        self._access = StoreAccess(
            store=self._store,
            root=self._groups,
            keys=keys,
            job=job,
            worker_id=worker_id,
            timeout=timeout,
            comm_timeout=comm_timeout,
        )
        self._say_that_it_regroups()
        self._monitor: StoreMonitor | None = None
        self._members: tuple[str, ...] = ()
        """The members of the generation of this worker's place, without those that it knows to be dead."""
        self._server: FinalStateServer | None = None
        self._has_noted = False
        self._watched: Store | None = None
        """A connection for monitors, one after the other: a new one for each would take as long as forming a group."""
        self._reports = LossReports(self._store, keys, worker_id)

    # -- places in rounds -------------------------------------------------------------------------------------

    def join(self, mine: Ready) -> Membership:
        if self.keys.number:  # the script goes on with another job: what follows the last one is a loop again
            self._store.compare_and_set(protocol.FINISHING, dump_count(self.keys.number - 1), b"")
        return self._await_round(self.generation, mine)

    def rejoin(self, generation: int, mine: Ready) -> Membership:
        return self._await_round(generation, mine)

    def join_after_loss(self, membership: Membership, mine: Ready, cause: CommError) -> Membership:
        self._stop_watching(wait=False)
        if membership.group is not None:
            membership.group.abort(cause)
            found = self._join_survivors(membership, membership.group, mine)
            if found is not None:
                return found
        self._reports.make_sure_broken(membership, cause, mine.step, evaluating=mine.evaluating)
        return self._await_round(membership.generation + 1, mine)

    def _join_survivors(self, membership: Membership, lost: Group, mine: Ready) -> Membership | None:
        """Form the next round of the generation with those who live, if this worker can tell; None if it has to wait
        for the agents. Who is inside an evaluation waits too: ``choose_round`` knows with whom it can go on."""
        dead = {membership.workers[rank] for rank in lost.dead_ranks()}
        if not dead or mine.evaluating:
            return None
        g, round_ = membership.generation, membership.round + 1
        key = self.keys.round(g, round_)
        lives = tuple(worker for worker in membership.workers if worker not in dead)
        record: bytes | None = None
        if self.worker_id != lives[0]:  # that one writes it, so that not everybody tries
            with suppress(StoreTimeout):
                (record,) = self._store.wait([key], slice_after(0.0))
        if record is None:
            record, agreed = self._store.get_many([key, protocol.members_key(g + 1)])
            if record is None:
                if agreed is not None:
                    return None  # the agents were first
                following = with_processes(Round(lives), identities_of(membership)).to_json()
                is_first = self._store.compare_and_set(key, None, following)
                record = following if is_first else self._store.get(key)
        found = None if record is None else Round.from_json(record)
        if found is None or self.worker_id not in found.workers or not set(found.workers) <= set(membership.workers):
            return None
        ranks = [membership.workers.index(worker) for worker in found.workers]

        def look() -> PeerLost | None:
            gone = [membership.workers[rank] for rank in lost.dead_ranks() if rank in ranks]
            return self._look_for_survivors(g, round_, found, gone)

        self._members = tuple(worker for worker in self._members if worker not in dead)
        return self._join(g, round_, found, mine, look)

    def _look_for_survivors(self, generation: int, round_: int, found: Round, dead: list[str]) -> PeerLost | None:
        """Why there is no use in waiting for the others, if so: one has died, or went on without this round."""
        others = [worker for worker in found.workers if worker != self.worker_id]
        done, record, *moved = self._store.get_many(
            [
                self.keys.done,
                self.keys.round(generation, round_),
                *(self.keys.ready(generation + 1, worker) for worker in others),
            ]
        )
        if record is None:
            self._store.compare_and_set(self.keys.round(generation, round_), None, found.to_json())
        gone = dead + [worker for worker, data in zip(others, moved, strict=True) if data is not None]
        if not gone and done is None:
            return None
        why = f"{', '.join(gone)} will not come" if gone else "all steps are done"
        return PeerLost(f"round {round_} of generation {generation} cannot form: {why}", generation=generation)

    def join_at_boundary(self, membership: Membership, mine: Ready) -> Membership:
        self._stop_watching()
        generation = membership.generation
        self._store.set(self.keys.crossed(membership.generation, membership.round, self.worker_id), PRESENT)
        if membership.rank == 0:
            self._close_round(membership)
        found = self._await_round(generation, mine, first_round=membership.round + 1, declared=True)
        if membership.group is not None:
            membership.group.close()
        return found

    def _close_round(self, membership: Membership) -> None:
        """Say what follows this round: another one with those who are ready, or the next generation."""
        g = membership.generation
        wanted, *leaving = self._store.get_many(
            [protocol.wanted_key(g), *(protocol.leaving_key(g, worker) for worker in membership.workers)]
        )
        if wanted is not None or any(key is not None for key in leaving):
            following = Round(move_to=g + 1)
        else:
            ready = self._ready(g, self._members)
            following = Round(tuple(w for w in self._members if w in ready or w in membership.workers))
            following = with_processes(following, declared_identities(ready) | identities_of(membership))
        self._store.compare_and_set(self.keys.round(g, membership.round + 1), None, following.to_json())

    def _await_round(self, generation: int, mine: Ready, *, first_round: int = 0, declared: bool = False) -> Membership:
        """Wait for a round with this worker in it and join its group; move on when a generation breaks."""
        round_, came = first_round, time.monotonic()
        told_at: float | None = None

        def report(count: int) -> None:
            nonlocal told_at
            report_progress(self._store, self.worker_id, mine.step, 0, count)
            if self.should_leave():
                told_at = told_at or time.monotonic()
                if not mine.has_state or time.monotonic() - told_at > timeouts.LEAVE_AFTER:
                    self._store.set(protocol.leaving_key(generation, self.worker_id), PRESENT)
                    raise ToldToLeave(f"worker {self.worker_id} leaves before generation {generation}")

        wait, absent = (
            Wait(self.timeout, report),
            Absence(self.worker_id, self.comm_timeout, self._reports.tell_agents),
        )
        agreed: protocol.Members | None = None
        is_there = True  # whether what was waited for last came in time
        told: bytes | None = None  # the record of the round, where it was waited for and came
        while True:
            keys = {
                "done": self.keys.done,
                "broken": protocol.broken_key(generation),
                "round": self.keys.round(generation, round_),
            }
            # What is asked for only where it can matter: each key is a request to a store that is asked by all workers.
            if agreed is None:
                keys["members"] = protocol.members_key(generation)
            if mine.evaluating:
                keys["evaluated"] = self.keys.evaluation(mine.evaluations)
            if time.monotonic() - came > timeouts.STALE_AFTER:
                keys["following"] = protocol.members_key(generation + 1)
            if not is_there:  # it takes long: somebody may have deleted what this worker has written
                keys |= {"said": protocol.regroups_key(self.worker_id)}
                keys |= {"own": self.keys.ready(generation, self.worker_id)} if declared else {}
            read: dict[str, bytes | None] = {"done": None, "broken": None, "round": told}
            if told is None:  # else whoever joins the group hears of the rest, see ``_look_while_joining``
                read = dict(zip(keys, self._store.get_many(list(keys.values())), strict=True))
            told = None
            if read.get("said", PRESENT) is None:
                self._say_that_it_regroups()
            finish = parse_finish(read["done"])
            if finish is not None and mine.has_state and not mine.evaluating:
                raise JobOver(finish, generation)
            if (evaluated := read.get("evaluated")) is not None:
                raise EvaluationKnown(Evaluation.from_json(evaluated).means)
            found = Round.from_json(record) if (record := read["round"]) is not None else None
            is_over = read["broken"] is not None or read.get("following") is not None
            if is_over or (found is not None and found.move_to is not None):
                if (
                    mine.has_state and not declared
                ):  # who waits for it in a round of survivors is to know that it went on
                    self._store.set(self.keys.ready(generation, self.worker_id), mine.to_json())
                generation, round_, declared, came, agreed = generation + 1, 0, False, time.monotonic(), None
                continue
            self.generation = generation
            if agreed is None:
                if (members := read["members"]) is None:
                    self._reports.tell_again(generation - 1)
                    awaited = [protocol.members_key(generation)]
                    came_now = wait.for_keys(self._store, awaited, f"the members of generation {generation}", came)
                    is_there = came_now is not None
                    continue
                agreed = protocol.Members.from_json(members)
            if agreed.is_forgotten:  # long over, and its end forgotten too
                generation, round_, declared, agreed = generation + 1, 0, False, None
                continue
            ids = tuple(member.id for member in agreed.workers)
            if self.worker_id not in ids:
                raise Ejected(
                    f"worker {self.worker_id} is not among the members of generation {generation} of job "
                    f"{self.job!r}: {', '.join(ids)}"
                )
            if not declared or read.get("own", PRESENT) is None:
                self._declare(generation, mine, ids)
                declared = True
            if finish is not None and not mine.has_state:
                if not self._void(finish, generation, ids, came):
                    wait.a_little(f"the others of generation {generation}, which have done all steps")
            elif found is not None and self.worker_id in found.workers:
                self._members = ids
                look = partial(self._look_while_joining, generation, round_, found, mine)
                membership = self._join(generation, round_, found, mine, look)
                if membership is not None:
                    return membership
                wait.a_little(f"generation {generation} to break")
            elif found is not None:
                round_ += 1
            else:
                awaited = [self.keys.round(generation, round_)]
                if round_ == 0 and convenes(self.worker_id, ids, mine, time.monotonic() - came):
                    ready = self._ready(generation, ids)
                    absent.look(generation, awaited_peers(ids, ready), mine)
                    awaited = self._convene(generation, self._awaited(ids, ready, came), ready)
                if awaited:
                    what = f"a place in generation {generation}, round {round_}"
                    values = wait.for_keys(self._store, awaited, what, came)
                    is_there = values is not None
                    if values and awaited == [self.keys.round(generation, round_)] and not mine.evaluating:
                        told = values[0]

    def _convene(self, generation: int, members: tuple[str, ...], ready: Mapping[str, Ready]) -> list[str]:
        """Write the first round of a generation, if it can be chosen; else return the keys to wait for until then."""
        choice = choose_round(members, ready)
        if choice is not None:
            choice = with_processes(choice, declared_identities(ready))
            self._store.compare_and_set(self.keys.round(generation, 0), None, choice.to_json())
            return []
        missing = awaited_peers(members, ready) or tuple(worker for worker in members if worker not in ready)
        return [self.keys.ready(generation, worker) for worker in missing]

    def _void(self, finish: Finish, generation: int, ids: tuple[str, ...], came: float) -> bool:
        """Return a newcomer finds that all steps are done: ``JobOver`` if a worker that was there lives.

        If none does, the final state is lost: once all have come, and all are new, what they found counts no more
        (True), and they begin as the first workers of a job do, with a save. Until then, False.
        """
        keeps = self._store.get_many([self.keys.keeps(generation, worker) for worker in ids])
        if any(value is not None for value in keeps) or len(self._access.ended(finish.workers)) == len(finish.workers):
            raise JobOver(finish, generation, self._access.members(generation))
        ready = self._ready(generation, ids)
        is_missing = any(worker not in ready for worker in self._awaited(ids, ready, came))
        if is_missing or any(one.has_state for one in ready.values()):
            return False
        if parse_finish(self._store.get(self.keys.done)) == finish:
            self._store.delete(self.keys.done)
            self._store.delete(protocol.FINISHING)
        return True

    def _awaited(self, ids: tuple[str, ...], ready: Mapping[str, Ready], came: float) -> tuple[str, ...]:
        """Return the members of a generation without those that will not come any more: their scripts have ended.

        One that still lives keeps the final state, and has its time to say so: ``came`` is when this worker came.
        """
        if time.monotonic() - came < timeouts.KEEPS_AFTER:
            return ids
        ended = self._access.ended([worker for worker in ids if worker not in ready])
        return tuple(worker for worker in ids if worker not in ended)

    def _join(
        self,
        generation: int,
        round_: int,
        record: Round,
        mine: Ready,
        look: Callable[[], PeerLost | None],
    ) -> Membership | None:
        """Form the group of a round; None when a worker of it was lost meanwhile. ``look`` is asked now and then why
        there is no use in waiting any longer."""
        workers = record.workers
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
                    interrupt=look,
                    identities=processes_of(record),
                )
            except CommError as error:
                self._reports.make_sure_broken(Membership(generation, round_, workers, rank, None), error, mine.step)
                return None
        membership = Membership(generation, round_, workers, rank, group)
        self.signals = Signals()
        absent = tuple(worker for worker in self._members if worker not in workers)
        self._watched = self._watched or self._store.clone()
        self._monitor = StoreMonitor(self._watched, self.keys, membership, self.worker_id, self.signals, absent)
        self._monitor.start()
        return membership

    # -- the store --------------------------------------------------------------------------------------------

    def _say_that_it_regroups(self) -> None:
        self._store.set(protocol.regroups_key(self.worker_id), PRESENT)

    def _declare(self, generation: int, mine: Ready, members: tuple[str, ...]) -> None:
        said = replace(mine.to_declare(members), process=identity_record(own_identity()))
        records = {self.keys.ready(generation, self.worker_id): said.to_json()}
        if mine.has_state:  # what it has committed since its last report is progress, should workers die again
            records[protocol.progress_key(self.worker_id)] = ProgressReport(step=mine.step, count=0, waits=0).to_json()
        self._store.set_many(records)

    def _ready(self, generation: int, workers: tuple[str, ...]) -> dict[str, Ready]:
        found = self._store.get_many([self.keys.ready(generation, worker) for worker in workers])
        return declared_by(workers, found)

    def _look_while_joining(self, generation: int, round_: int, found: Round, mine: Ready) -> PeerLost | None:
        """Why there is no use in waiting for the others, if so. They find the round by its record: it has to stay."""
        done, record = self._store.get_many([self.keys.done, self.keys.round(generation, round_)])
        if done is not None and not mine.evaluating:
            return PeerLost(f"round {round_} of generation {generation}: all steps are done", generation=generation)
        lost = self._access.broken(generation)
        if lost is None and record is None:
            self._store.compare_and_set(self.keys.round(generation, round_), None, found.to_json())
        return lost

    # -- leaving and progress ---------------------------------------------------------------------------------

    def announce_leaving(self, membership: Membership) -> None:
        self._store.set(protocol.leaving_key(membership.generation, self.worker_id), PRESENT)
        self._store.set(self.keys.leaving(membership.generation), PRESENT)

    def step_aside(self, membership: Membership, patience: float = timeouts.STEP_ASIDE) -> None:
        self._stop_watching()
        self._store.compare_and_set(
            self.keys.round(membership.generation, membership.round + 1),
            None,
            Round(move_to=membership.generation + 1).to_json(),
        )
        self._store.set(self.keys.crossed(membership.generation, membership.round, self.worker_id), PRESENT)
        began = time.monotonic()
        others = [worker for worker in membership.workers if worker != self.worker_id]
        missing = [self.keys.crossed(membership.generation, membership.round, worker) for worker in others]
        while missing and (waited := time.monotonic() - began) < patience:
            try:
                self._store.wait(missing[:AT_ONCE], slice_after(waited))
                missing = missing[AT_ONCE:]
            except StoreTimeout:
                if self._store.get(protocol.broken_key(membership.generation)) is not None:
                    return

    def declare_done(self, membership: Membership, step: int) -> Finish:
        finish = finish_of(membership, step, self._access.members(membership.generation) or {})
        self._store.compare_and_set(self.keys.done, None, finish.to_json())  # the others write the same
        self._store.set(protocol.FINISHING, dump_count(self.keys.number))
        self._store.set(self.keys.committed, dump_count(step))
        return finish

    def finish_after(self, membership: Membership, cause: CommError, step: int) -> Finish | None:
        self._reports.make_sure_broken(membership, cause)
        return parse_finish(self._store.get(self.keys.done))

    def keep(self, finish: Finish, rank: int, generation: int, state: Encoded | None) -> FinalStateServer | None:
        self._server = FinalStateServer(self._access.clone(), finish, rank, generation, state)
        return self._server

    @property
    def newest_generation(self) -> int:
        """Return the newest one that this worker knows of, during the loop or after it."""
        return self.generation if self._server is None else self._server.generation

    def take_over(self, over: JobOver) -> TakenOver | None:
        return take_over(self._access, over.finish, over.generation, over.members)

    def note_commit(self, membership: Membership, step: int) -> None:
        if membership.rank != 0:
            return
        if self._monitor is None or not self._has_noted:
            self._has_noted = True
            self.committed_steps.note(step)
        else:
            self._monitor.committed = step

    def publish_evaluation(self, number: int, result: dict[str, float]) -> None:
        self._store.set(self.keys.evaluation(number), Evaluation(result).to_json())

    def report(self, step: int, pace: WorkerPace | None = None) -> None:
        if self._monitor is not None:
            self._monitor.progress = (step, self._monitor.progress[1] + 1)
            self._monitor.pace = pace or self._monitor.pace

    def waiting(self, is_waiting: bool) -> None:
        if self._monitor is not None:
            self._monitor.is_waiting = is_waiting

    def _stop_watching(self, *, wait: bool = True) -> None:
        if self._monitor is None:
            return
        self._monitor.stop(wait=wait)
        if self._monitor.has_lost_store:
            self._watched = None
        self._monitor = None

    def close(self) -> None:
        self._stop_watching()
        if self._watched is not None:
            self._watched.close()
            self._watched = None
