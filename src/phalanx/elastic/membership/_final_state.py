"""Keeps the final state after the last step, for whoever takes the place of a worker that dies before its script ends.

The script goes on in the main thread and may do to the model whatever it likes, so a copy is kept, and a thread hands
it over: it follows the generations that the agents agree on, says in each that this worker lives and keeps the state,
answers newcomers that ask, and puts right what a stranger may write over. ``stay`` is for the end of the process:
nobody goes before all scripts have ended, since until then another may need the state.

Guarantees: the state handed over is that of the last commit, whatever the script has done since; a loss of the store,
or of a newcomer in the middle of the handover, ends nothing here. Who gives up waiting says so.
Rejected: serving the live state (a script that casts or swaps weights after the loop would hand over another one);
leaving the state with the agent (it has no torch memory, and its node may be the one that is lost).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx import protocol
from phalanx.comm import Group
from phalanx.comm._background import FOREVER, Background
from phalanx.comm.stores import Store
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import Json
from phalanx.elastic.checkpoint._stream import receive_state, send_encoded
from phalanx.elastic.membership._coordinator import NothingLeft, ResultLost
from phalanx.elastic.membership._finish import find_vacant, prefer
from phalanx.elastic.membership._store_monitor import report_progress
from phalanx.errors import CommError, PeerLost, StoreError
from phalanx.protocol import PRESENT, Finish, JobKeys, dump_count, timeouts

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Of how many ranks the ends are asked for at a time: usually it is one rank that all others wait for."""
SAY_AFTER = 10.0
"""Seconds of waiting for other scripts before a line says so."""

Encoded = tuple[Json, Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    """A worker's own connection to the job's store, and what it needs to meet others there."""

    store: Store
    root: Store
    keys: JobKeys
    job: str
    worker_id: str
    timeout: float
    comm_timeout: float

    def clone(self) -> StoreAccess:
        return replace(self, store=self.store.clone(), root=self.root.clone())

    def close(self) -> None:
        self.store.close()
        self.root.close()

    def members(self, generation: int) -> dict[str, str] | None:
        """Return the hosts of a generation's workers by worker; None before it is agreed on."""
        data = self.store.get(protocol.members_key(generation))
        if data is None:
            return None
        return {member.id: member.host for member in protocol.Members.from_json(data).workers}

    def broken(self, generation: int) -> PeerLost | None:
        data = self.store.get(protocol.broken_key(generation))
        if data is None:
            return None
        reason = protocol.Broken.from_json(data).reason
        return PeerLost(f"generation {generation} is over: {reason}", generation=generation)

    def holders(self, finish: Finish, ranks: Sequence[int]) -> list[str]:
        """Return who has these ranks now."""
        found = self.store.get_many([self.keys.claim(finish.generation, rank) for rank in ranks])
        return [
            finish.workers[rank] if data is None else data.decode(errors="replace")
            for rank, data in zip(ranks, found, strict=True)
        ]

    def ended(self, workers: Sequence[str]) -> set[str]:
        """Return those whose scripts have ended."""
        found = self.store.get_many([protocol.ended_key(worker) for worker in workers])
        return {worker for worker, data in zip(workers, found, strict=True) if data is not None}

    def meet(self, source: str, worker: str, generation: int) -> Group:
        """Return the group of the two: the one that keeps the state is rank 0."""
        return Group.create(
            self.root.namespace(self.keys.handover(source, worker)),
            int(worker == self.worker_id),
            2,
            timeout=self.comm_timeout,
            job=self.job,
            generation=generation,
            interrupt=lambda: self.broken(generation),
        )


@dataclass(frozen=True)
class TakenOver:
    """What a newcomer got: its rank, who else is there, and the final state."""

    rank: int
    workers: tuple[str, ...]
    generation: int
    source: str
    state: State


def take_over(at: StoreAccess, finish: Finish, generation: int, members: Mapping[str, str]) -> TakenOver | None:
    """Claim a vacant rank and fetch the final state; None when the generation breaks meanwhile.

    ``NothingLeft`` when no rank is vacant, ``ResultLost`` when one is and nobody hands the state over.
    """
    rank = _claim(at, finish, members)
    workers = tuple(at.holders(finish, range(len(finish.workers))))
    until = time.monotonic() + at.comm_timeout
    problems: dict[str, str] = {}
    while True:
        found = at.store.get_many([at.keys.keeps(generation, worker) for worker in members])
        servers = [w for w, data in zip(members, found, strict=True) if data == dump_count(1) and w not in problems]
        for source in servers:
            try:
                state = _fetch(at, source, generation)
                return TakenOver(rank, workers, generation, source, state)
            except CommError as error:
                problems[source] = str(error)
            if at.broken(generation) is not None:
                return None
        if servers:
            continue
        silent = [w for w, data in zip(members, found, strict=True) if data is None and w in finish.workers]
        if not silent or time.monotonic() > until:
            break
        if at.broken(generation) is not None:
            return None
        time.sleep(
            timeouts.WATCH_INTERVAL
        )  # it lives, and so is about to say whether it keeps the state, or to say so again
    why = "; ".join(f"{worker}: {problem}" for worker, problem in problems.items())
    raise ResultLost(
        f"worker {at.worker_id} takes the place of rank {rank}, lost after the last step ({finish.step}), but no "
        f"worker handed over the final state ({why or 'none keeps it: RunOptions(hold=0)'}); what the script does "
        f"after its steps on rank {rank} may be missing. Run the job again, with saves it resumes from the last one"
    )


def _claim(at: StoreAccess, finish: Finish, members: Mapping[str, str]) -> int:
    while True:
        holders = at.holders(finish, range(len(finish.workers)))
        if at.worker_id in holders:
            return holders.index(at.worker_id)
        vacant = find_vacant(holders, at.ended(holders), members)
        if not vacant:
            raise NothingLeft(
                f"worker {at.worker_id} came after the last step ({finish.step}) of job {at.job!r}, and every rank has "
                "its worker: nothing is left to do"
            )
        best = prefer(vacant, finish.hosts, members[at.worker_id])[0]
        before = None if best.worker == finish.workers[best.rank] else best.worker.encode()
        at.store.compare_and_set(at.keys.claim(finish.generation, best.rank), before, at.worker_id.encode())


def _fetch(at: StoreAccess, source: str, generation: int) -> State:
    at.store.set(at.keys.ask(generation, source, at.worker_id), PRESENT)
    group = at.meet(source, at.worker_id, generation)
    try:
        return receive_state(group, 0)
    finally:
        group.close()


class FinalStateServer:
    """The thread of one worker after the last step; ``state`` is a copy, or None if it is not to be handed over."""

    def __init__(self, at: StoreAccess, finish: Finish, rank: int, generation: int, state: Encoded | None) -> None:
        self.generation = generation
        self.num_served = 0
        self._at = at
        self._finish = finish
        self._rank = rank
        self._state = state
        self._members: dict[str, str] = {}
        self._answered: set[str] = set()
        self._complaint = ""
        self._has_ended = False
        self._ending = threading.Lock()
        self._num_reports = 0
        self._reported = 0.0
        self._stop = threading.Event()
        self._thread = Background(
            self._run, "phalanx-keep", on_failure=lambda error: None, attempts=FOREVER, stop=self._stop
        )
        self._enter(generation)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._at.close()
        self._state = None  # as large as the job's; this object is kept for its generation

    # -- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(timeouts.WATCH_INTERVAL):
            try:
                self._follow()
                self._repair()
                self._answer()
                self._report()
            except StoreError:
                return  # with the store its agent goes too, and ends this worker
            except CommError:
                pass  # the newcomer died, or its generation was broken: if it still wants the state, it asks again
            except Exception as error:  # a record that is none of ours, say: this thread must not end for it
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("worker %s, keeping the final state: %s", self._at.worker_id, error)

    def _follow(self) -> None:
        while self._at.members(self.generation + 1) is not None:
            self._enter(self.generation + 1)

    def _enter(self, generation: int) -> None:
        self.generation = generation
        self._members = self._at.members(generation) or {}
        self._answered.clear()
        self._at.store.set(self._at.keys.keeps(generation, self._at.worker_id), self._keeps)

    def _repair(self) -> None:
        """Write again what must stay until all scripts have ended. Written once, it is gone for good when a stranger
        writes over it; nobody else deletes it while this worker lives."""
        with self._ending:
            self._write_again()

    def _write_again(self) -> None:
        at = self._at
        records = {
            at.keys.done: self._finish.to_json(),
            at.keys.keeps(self.generation, at.worker_id): self._keeps,
        }
        if self._finish.workers[self._rank] != at.worker_id:
            records[at.keys.claim(self._finish.generation, self._rank)] = at.worker_id.encode()
        if self._has_ended:
            records[protocol.ended_key(at.worker_id)] = PRESENT
        for (key, record), data in zip(records.items(), at.store.get_many(list(records)), strict=True):
            if data is None:
                at.store.compare_and_set(key, None, record)

    @property
    def _keeps(self) -> bytes:
        return dump_count(self._state is not None)

    def _answer(self) -> None:
        newcomers = [worker for worker in self._members if worker not in self._finish.workers]
        if self._state is None or not newcomers:
            return
        keys = [self._at.keys.ask(self.generation, self._at.worker_id, worker) for worker in newcomers]
        for worker, data in zip(newcomers, self._at.store.get_many(keys), strict=True):
            if data is not None and worker not in self._answered:
                self._answered.add(worker)  # once in a generation: if it fails, the newcomer turns to another
                group = self._at.meet(self._at.worker_id, worker, self.generation)
                try:
                    send_encoded(group, *self._state, dst=1)
                    self.num_served += 1
                finally:
                    group.close()

    def _report(self) -> None:
        """To the hang detector: what a script does after its steps may take as long as it likes."""
        if time.monotonic() - self._reported > timeouts.PROGRESS_INTERVAL:
            self._reported = time.monotonic()
            self._num_reports += 1
            report_progress(self._at.store, self._at.worker_id, self._finish.step, 0, -self._num_reports)

    # -- at the end of the process ----------------------------------------------------------------------------

    def stay(self, limit: float) -> None:
        """Say that this worker's script has ended; return when those of all others have, or after ``limit`` seconds.

        ``ResultLost`` when a rank stays vacant for longer than a worker may wait for a place.
        """
        with self._at.store.clone() as store:
            at = replace(self._at, store=store)
            store.set(protocol.ended_key(at.worker_id), PRESENT)
            self._has_ended = True
            pending = [rank for rank in range(len(self._finish.workers)) if rank != self._rank]
            began = time.monotonic()
            vacant_since: dict[int, float] = {}
            has_spoken = False
            while pending and limit > 0:
                asked = pending[:AT_ONCE]
                holders = at.holders(self._finish, asked)
                ended = at.ended(holders)
                missing = {rank: w for rank, w in zip(asked, holders, strict=True) if w not in ended}
                pending = [rank for rank in pending if rank in missing or rank not in asked]
                now = time.monotonic()
                vacant = {r: w for r, w in missing.items() if self._members and w not in self._members}
                vacant_since = {rank: vacant_since.get(rank, now) for rank in vacant}
                self._check_vacant(at, vacant, vacant_since, now)
                if not has_spoken and missing and now - began > SAY_AFTER:
                    has_spoken = True
                    self._say_waiting(missing, limit)
                if pending and now - began > limit:
                    _say(
                        f"worker {at.worker_id} has waited {limit:g} s for the scripts of ranks {pending[:AT_ONCE]} "
                        "to end (RunOptions(hold=...)) and goes; if one of them dies now, its result is lost"
                    )
                    return
                if missing:
                    self._stop.wait(min(0.25, 0.02 + (now - began) / 10))

    def _check_vacant(self, at: StoreAccess, vacant: Mapping[int, str], since: Mapping[int, float], now: float) -> None:
        for rank, worker in vacant.items():
            if now - since[rank] > at.timeout:
                with self._ending:
                    self._has_ended = False
                    at.store.delete(protocol.ended_key(at.worker_id))  # it is to count as a failure
                raise ResultLost(
                    f"rank {rank} (worker {worker}) was lost after the last step ({self._finish.step}) and before its "
                    f"script had ended, and nobody has taken its place for {at.timeout:g} s: what it does after its "
                    "steps may be missing. Run the job again, with saves it resumes from the last one"
                )

    def _say_waiting(self, missing: Mapping[int, str], limit: float) -> None:
        first = next(rank for rank in range(len(self._finish.workers)) if rank not in missing)
        if self._rank == first:  # one voice is enough
            names = ", ".join(f"{rank} ({worker})" for rank, worker in missing.items())
            _say(
                f"rank {self._rank} has ended its script and waits for that of rank {names}, to hand over the final "
                f"state should it die; at most {limit:g} s (RunOptions(hold=...))"
            )


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)
