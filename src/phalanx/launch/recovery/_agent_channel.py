"""Carries what agents tell each other in the job's store, beside the rendezvous: recoveries, failures, who is done.

Every generation gets exactly one recovery: it is written by compare-and-set, so two agents that see two deaths at once
cannot count them twice or disagree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from phalanx.comm.stores._interface import Store
from phalanx.launch.failures._process_failure import ProcessFailure, readable_time
from phalanx.protocol import (
    FINISHING,
    PRESENT,
    SETBACKS,
    STOP_ASKED,
    Action,
    FailureReport,
    LostContact,
    RecordError,
    Recovery,
    Setbacks,
    StacksRequest,
    StopRequest,
    any_contact_key,
    contact_key,
    ended_key,
    failures_prefix,
    leaving_key,
    progress_key,
    recovery_key,
    regroups_key,
    stacks_key,
    stage_key,
    wish_key,
)

log = logging.getLogger(__name__)

MAX_TEXT = 100_000
MAX_LINE = 2_000
"""Characters of a failure that other agents are told: a store need not take more than about 1 MB (etcd does not)."""


class AgentChannel:
    """The records of one job. ``store`` is in the job's namespace."""

    def __init__(self, store: Store, lasting: dict[str, bytes] | None = None) -> None:
        """``lasting`` collects what is written once and has to stay, for ``put_right``."""
        self._store = store
        self._lasting = {} if lasting is None else lasting

    def decide(self, generation: int, recovery: Recovery) -> Recovery:
        """Propose how a generation ends; the recovery that counts is returned."""
        key, data = recovery_key(generation), recovery.to_json()
        expected: bytes | None = None
        while not self._store.compare_and_set(key, expected, data):
            expected = self._store.get(key)
            standing = self._parse_recovery(expected)
            if standing is not None:
                return standing
        return recovery

    def recovery(self, generation: int) -> Recovery | None:
        return self._parse_recovery(self._store.get(recovery_key(generation)))

    def _parse_recovery(self, data: bytes | None) -> Recovery | None:
        """Return what is none of ours is named, and does not stand in the way of one that is."""
        try:
            return None if data is None else Recovery.from_json(data)
        except RecordError as error:
            log.warning("ignored how a generation is said to end: %s", error)
            return None

    def recovery_before(self, generation: int) -> Recovery:
        """Return how the generation before this one ended; of the first one, and where nobody has said: without a
        count."""
        previous = self.recovery(generation - 1) if generation > 0 else None
        return previous or Recovery(action=Action.REGROUP, restarts=0, reason="")

    def report(self, failure: ProcessFailure) -> None:
        record = failure.to_record()
        record.pop("error_file_data")  # large, and its content is in the other fields
        for name in ("message", "traceback", "note"):
            record[name] = clip(record[name], MAX_TEXT)
        record["stderr_tail"] = tuple(clip(line, MAX_LINE) for line in record["stderr_tail"])
        key = f"{failures_prefix(failure.generation)}{failure.worker_id}"
        self._store.set(key, FailureReport(**record).to_json())

    def failures(self, generation: int) -> dict[int, ProcessFailure]:
        """Return all failures of a generation, of all nodes, by global rank."""
        found = {}
        for data in self._store.items(failures_prefix(generation)).values():
            try:
                failure = parse_failure(data)
            except RecordError as error:  # the others are worth telling all the same
                log.warning("a failure of generation %d cannot be read: %s", generation, error)
                continue
            found[failure.rank] = failure
        return found

    def say_done(self, generation: int, node_rank: int, stage: str) -> None:
        self._say(stage_key(stage, generation, node_rank), PRESENT)

    def _say(self, key: str, record: bytes) -> None:
        self._lasting[key] = record
        self._store.set(key, record)

    def put_right(self, records: Mapping[str, bytes]) -> None:
        """Write again what is gone of these: a stranger may have written over it, and others wait for it."""
        for key, found in zip(records, self._store.get_many(list(records)), strict=True):
            if found is None:
                self._store.compare_and_set(key, None, records[key])

    def wait_done(self, generation: int, num_nodes: int, stage: str, timeout: float) -> None:
        """Block until every node has said so. ``StoreTimeout`` or ``StoreLost`` when that does not happen."""
        keys = [stage_key(stage, generation, node_rank) for node_rank in range(num_nodes)]
        self._store.wait(keys, timeout)

    def num_left(self, generation: int, num_nodes: int) -> int:
        """Return how many nodes of a generation are done and did not wait for the others."""
        keys = [stage_key("left", generation, node_rank) for node_rank in range(num_nodes)]
        return sum(value is not None for value in self._store.get_many(keys))

    def is_leaving(self, generation: int, worker_id: str) -> bool:
        return self._store.get(leaving_key(generation, worker_id)) is not None

    def say_ended(self, worker_id: str) -> None:
        """A worker's process has ended well; it may not have had the time to say so."""
        self._say(ended_key(worker_id), PRESENT)

    def has_ended(self, worker_id: str) -> bool:
        """Return whether a worker's script had ended well, whatever became of its process afterwards."""
        return self._store.get(ended_key(worker_id)) is not None

    def is_finishing(self) -> bool:
        """Return whether the workers have done all steps and only run what follows them."""
        return bool(self._store.get(FINISHING))

    def setbacks(self) -> Setbacks:
        return _parse_setbacks(self._store.get(SETBACKS))

    def request_stacks(self, generation: int, reason: str) -> None:
        """Ask every agent to write its workers' stacks to the logs."""
        self._store.compare_and_set(stacks_key(generation), None, StacksRequest(reason=reason).to_json())

    def read_requests(self, generation: int, node_id: str) -> tuple[int | None, str, Setbacks, str]:
        """Return the wished number of workers here (0: the node is to be drained), why stacks are asked for ("": they
        are not), how often the job went back to an earlier step, and why the job is to stop ("": it is not)."""
        keys = [wish_key(node_id), stacks_key(generation), SETBACKS, STOP_ASKED]
        wish, stacks, setbacks, stop = self._store.get_many(keys)
        reason = StacksRequest.from_json(stacks).reason if stacks else ""
        stop_reason = StopRequest.from_json(stop).reason if stop else ""
        return parse_wish(wish), reason, _parse_setbacks(setbacks), stop_reason

    def read_regrouping(self, worker_ids: list[str]) -> set[str]:
        """Return who of these has said that it can regroup."""
        found = self._store.get_many([regroups_key(worker_id) for worker_id in worker_ids])
        return {worker_id for worker_id, value in zip(worker_ids, found, strict=True) if value is not None}

    def has_lost_contact(self, generation: int) -> bool:
        """Return whether a worker of the generation says that it lost contact with others."""
        return self._store.get(any_contact_key(generation)) is not None

    def read_lost_contact(self, generation: int, worker_ids: Sequence[str]) -> list[LostContact]:
        """Return what workers of the generation wrote about it; a record that is none is named and ignored."""
        found = []
        for worker_id, data in zip(
            worker_ids, self._store.get_many([contact_key(generation, w) for w in worker_ids]), strict=True
        ):
            try:
                word = None if data is None else LostContact.from_json(data)
            except RecordError as error:
                log.warning("ignored what worker %s wrote about lost contact: %s", worker_id, error)
                continue
            if word is not None and word.by == worker_id:
                found.append(word)
        return found

    def read_progress(self, worker_ids: list[str]) -> dict[str, bytes | None]:
        return dict(zip(worker_ids, self._store.get_many([progress_key(w) for w in worker_ids]), strict=True))


def clip(text: str, limit: int) -> str:
    """Return the text, without its middle when it is longer than the limit.

    >>> clip("0123456789", 4)
    '01 [... 6 characters left out ...] 89'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def parse_wish(data: bytes | None) -> int | None:
    """Return a number of workers (0: drain the node); a wish that makes no sense is as good as none."""
    if data is None:
        return None
    try:
        count = int(data) if len(data) < 10 else -1
    except ValueError:
        return None
    return count if count >= 0 else None


def parse_failure(data: bytes) -> ProcessFailure:
    """``RecordError`` when it is none."""
    found = vars(FailureReport.from_json(data))
    message = found["message"] or "it has left no message"  # without one, a file of this machine would be looked for
    return ProcessFailure(**{**found, "message": message, "timestamp": readable_time(found["timestamp"])})


def _parse_setbacks(data: bytes | None) -> Setbacks:
    """Return what workers have counted; a count that makes no sense is as good as none."""
    try:
        return Setbacks() if data is None else Setbacks.from_json(data)
    except RecordError:
        return Setbacks()
