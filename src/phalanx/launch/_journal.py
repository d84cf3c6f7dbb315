"""What agents tell each other through the job's store, beside the rendezvous: verdicts, failures, who is done.

Owns the keys under ``agents/`` and their records (versioned JSON). Every generation gets exactly one verdict: it is
written by compare-and-set, so two agents that see two deaths at once cannot count them twice or disagree.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.comm.stores._interface import Store
from phalanx.launch._failures import ProcessFailure
from phalanx.launch._policy import Action, Verdict
from phalanx.launch._streak import Streak
from phalanx.launch.rendezvous._records import stage_key
from phalanx.membership import (
    FINISHING,
    SETBACKS,
    VERSION,
    RecordError,
    Setbacks,
    ended_key,
    leaving_key,
    progress_key,
    regroups_key,
    wish_key,
)

MAX_TEXT = 100_000
MAX_LINE = 2_000
"""Characters of a failure that other agents are told: a store need not take more than about 1 MB (etcd does not)."""


class Journal:
    """The records of one job. ``store`` is in the job's namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def decide(self, generation: int, verdict: Verdict) -> Verdict:
        """Propose how a generation ends; the verdict that counts is returned."""
        key = _verdict_key(generation)
        body = {**vars(verdict), "action": verdict.action.value, "streak": verdict.streak.to_record()}
        while not self._store.compare_and_set(key, None, _dump(body)):
            standing = self.verdict(generation)
            if standing is not None:  # else somebody deleted it a moment ago
                return standing
        return verdict

    def verdict(self, generation: int) -> Verdict | None:
        data = self._store.get(_verdict_key(generation))
        if data is None:
            return None
        record = _load(data, "verdict")
        try:
            return Verdict(
                action=Action(record["action"]),
                restarts=int(record["restarts"]),
                reason=str(record["reason"]),
                starts_anew=bool(record["starts_anew"]),
                streak=Streak.from_record(record["streak"]),
                ports_taken=int(record["ports_taken"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise RecordError(f"verdict on generation {generation}: {error!r} in {data[:200]!r}") from error

    def verdict_before(self, generation: int) -> Verdict:
        """How the generation before this one ended; of the first one, and where nobody has said: without a count."""
        previous = self.verdict(generation - 1) if generation > 0 else None
        return previous or Verdict(action=Action.REGROUP, restarts=0, reason="")

    def report(self, failure: ProcessFailure) -> None:
        record = failure.to_record()
        record.pop("error_file_data")  # large, and its content is in the other fields
        for name in ("message", "traceback", "note"):
            record[name] = clip(record[name], MAX_TEXT)
        record["stderr_tail"] = [clip(line, MAX_LINE) for line in record["stderr_tail"]]
        key = f"agents/failures/{failure.generation}/{failure.worker_id}"
        self._store.set(key, _dump(record))

    def failures(self, generation: int) -> dict[int, ProcessFailure]:
        """All failures of a generation, of all nodes, by global rank."""
        found = {}
        for data in self._store.items(f"agents/failures/{generation}/").values():
            failure = ProcessFailure.from_record(_load(data, "failure"))
            found[failure.rank] = failure
        return found

    def say_done(self, generation: int, node_rank: int, stage: str) -> None:
        self._store.set(stage_key(stage, generation, node_rank), _dump({}))

    def wait_done(self, generation: int, num_nodes: int, stage: str, timeout: float) -> None:
        """Block until every node has said so. ``StoreTimeout`` or ``StoreLost`` when that does not happen."""
        keys = [stage_key(stage, generation, node_rank) for node_rank in range(num_nodes)]
        self._store.wait(keys, timeout)

    def num_left(self, generation: int, num_nodes: int) -> int:
        """How many nodes of a generation are done and did not wait for the others."""
        keys = [stage_key("left", generation, node_rank) for node_rank in range(num_nodes)]
        return sum(value is not None for value in self._store.get_many(keys))

    def is_leaving(self, generation: int, worker_id: str) -> bool:
        return self._store.get(leaving_key(generation, worker_id)) is not None

    def say_ended(self, worker_id: str) -> None:
        """A worker's process has ended well; it may not have had the time to say so."""
        self._store.set(ended_key(worker_id), b"1")

    def has_ended(self, worker_id: str) -> bool:
        """Whether a worker's script had ended well, whatever became of its process afterwards."""
        return self._store.get(ended_key(worker_id)) is not None

    def is_finishing(self) -> bool:
        """Whether the workers have done all steps and only run what follows them."""
        return bool(self._store.get(FINISHING))

    def setbacks(self) -> Setbacks:
        return _parse_setbacks(self._store.get(SETBACKS))

    def request_stacks(self, generation: int, reason: str) -> None:
        """Ask every agent to write its workers' stacks to the logs."""
        self._store.compare_and_set(_stacks_key(generation), None, _dump({"reason": reason}))

    def read_requests(self, generation: int, node_id: str) -> tuple[int | None, str, Setbacks]:
        """The wished number of workers here, why stacks are asked for ("": they are not), and how often the job went
        back to an earlier step."""
        wish, stacks, setbacks = self._store.get_many([wish_key(node_id), _stacks_key(generation), SETBACKS])
        reason = str(_load(stacks, "stacks")["reason"]) if stacks else ""
        return parse_wish(wish), reason, _parse_setbacks(setbacks)

    def read_regrouping(self, worker_ids: list[str]) -> set[str]:
        """Who of these has said that it can regroup."""
        found = self._store.get_many([regroups_key(worker_id) for worker_id in worker_ids])
        return {worker_id for worker_id, value in zip(worker_ids, found, strict=True) if value is not None}

    def read_progress(self, worker_ids: list[str]) -> dict[str, bytes | None]:
        return dict(zip(worker_ids, self._store.get_many([progress_key(w) for w in worker_ids]), strict=True))


def clip(text: str, limit: int) -> str:
    """The text, without its middle when it is longer than the limit.

    >>> clip("0123456789", 4)
    '01 [... 6 characters left out ...] 89'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def parse_wish(data: bytes | None) -> int | None:
    """A number of workers that is at least 1; a wish that makes no sense is as good as none."""
    if data is None:
        return None
    try:
        count = int(data)
    except ValueError:
        return None
    return count if count >= 1 else None


def _parse_setbacks(data: bytes | None) -> Setbacks:
    """What workers have counted; a count that makes no sense is as good as none."""
    try:
        return Setbacks() if data is None else Setbacks.from_json(data)
    except RecordError:
        return Setbacks()


def _verdict_key(generation: int) -> str:
    return f"agents/verdict/{generation}"


def _stacks_key(generation: int) -> str:
    return f"agents/stacks/{generation}"


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps({"v": VERSION, **record}, separators=(",", ":")).encode()


def _load(data: bytes, kind: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except ValueError as error:
        raise RecordError(f"{kind} record is not JSON: {data[:80]!r}") from error
    if not isinstance(record, dict) or record.pop("v", None) != VERSION:
        raise RecordError(f"{kind} record has an unknown version; expected {VERSION}: {data[:80]!r}")
    return record
