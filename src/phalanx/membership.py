"""The contract between an agent and its workers: environment names, store keys, and the records behind them.

Owns values only; nothing here talks to a store. Agents write these records, workers read them, neither imports the
other. All keys live in the namespace ``job_prefix(job)`` of the job's store; records are JSON with a version number.

How a heal goes: a worker dies -> its agent sets ``broken_key(g)`` -> survivors drop their step and wait for
``members_key(g + 1)`` -> the agents agree on g+1 and write it -> survivors and replacements (started with
``PHALANX_GENERATION=g+1``) form the group of g+1 in ``group_prefix(job, g + 1)``. A newcomer that can wait sets
``wanted_key(g)`` instead: workers regroup at the next step boundary. A worker that leaves politely sets
``leaving_key(g, worker_id)``; its agent plans g+1 without it and breaks g once the worker has exited with code 0.
Contact that is lost while nobody dies only workers can see: each writes ``contact_key(g, worker_id)``, then
``any_contact_key(g)``, and the agents decide who, if anybody, is replaced (``phalanx.launch._contact``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 1

ENV_STORE = "PHALANX_STORE"
"""URL of the job's store for ``phalanx.comm.stores.connect``: tcp://host:port, file:///dir, etcd://host:port."""
ENV_JOB = "PHALANX_JOB"
ENV_GENERATION = "PHALANX_GENERATION"
ENV_WORKER_ID = "PHALANX_WORKER_ID"
"""Unique among all workers the job ever has; kept by a worker through all its generations."""
ENV_ON_FAILURE = "PHALANX_ON_FAILURE"
"""``heal`` or ``restart``."""

ENV_SECRET = "PHALANX_JOB_SECRET"
ENV_SECRET_FILE = "PHALANX_JOB_SECRET_FILE"
"""With either, agents and workers sign all records and refuse those that are not signed."""


def job_prefix(job: str) -> str:
    return f"phalanx/{job}"


def group_prefix(job: str, generation: int) -> str:
    """Namespace of the process group of one generation."""
    return f"{job_prefix(job)}/gen/{generation}/group"


def members_key(generation: int) -> str:
    """JSON of ``Members``: the agreed membership of a generation. Written once."""
    return f"gen/{generation}/members"


def broken_key(generation: int) -> str:
    """JSON of ``Broken``: the generation is over, stop what is in flight."""
    return f"gen/{generation}/broken"


def wanted_key(generation: int) -> str:
    """JSON of ``Broken``: someone would like a new generation at the next step boundary."""
    return f"gen/{generation}/wanted"


def leaving_key(generation: int, worker_id: str) -> str:
    """Present when the worker will exit with code 0 at its next step boundary."""
    return f"gen/{generation}/leaving/{worker_id}"


def contact_key(generation: int, worker_id: str) -> str:
    """JSON of ``LostContact``: what the worker saw when it lost contact with others of the generation."""
    return f"gen/{generation}/contact/by/{worker_id}"


def any_contact_key(generation: int) -> str:
    """Present when some worker of the generation has written ``contact_key``; the one key that agents look at."""
    return f"gen/{generation}/contact/any"


def progress_key(worker_id: str) -> str:
    """JSON ``{"step": n}``, rewritten by a worker when it makes progress; the hang detector reads it."""
    return f"progress/{worker_id}"


def wish_key(node_id: str) -> str:
    """How many workers a node should run, as decimal text; its agent grows or shrinks the node accordingly."""
    return f"wish/{node_id}"


_COUNTERS = frozenset({"tickets", "bells", "num_ready", "num_leaving", "crossed"})


def is_counter(key: str) -> bool:
    """Whether a key holds a counter, which the store itself changes, and not a record.

    >>> is_counter("rdzv/bells"), is_counter("elastic/3/crossed/0"), is_counter("gen/3/members")
    (True, True, False)
    """
    return not _COUNTERS.isdisjoint(key.split("/"))


class RecordError(ValueError):
    """A control record does not parse or has a version that this release does not know."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker of a generation."""

    id: str
    rank: int
    node_rank: int
    local_rank: int
    local_size: int
    host: str
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Members:
    """Who is in a generation; ``workers`` are in the order of their ranks."""

    generation: int
    workers: tuple[Member, ...]
    num_nodes: int
    master_addr: str
    master_port: int

    def to_json(self) -> bytes:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Members:
        record = _parse(data, "members")
        workers = tuple(Member(**worker) for worker in record.pop("workers"))
        return cls(workers=workers, **record)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Why a generation ends, and which workers are known to be gone.

    ``at_once``: the step under way cannot be finished, although nobody is known to be gone.
    """

    reason: str
    workers: tuple[str, ...] = ()
    at_once: bool = False

    def to_json(self) -> bytes:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Broken:
        record = _parse(data, "broken")
        return cls(
            reason=record["reason"],
            workers=tuple(record["workers"]),
            at_once=bool(record.get("at_once", False)),
        )


@dataclass(frozen=True, kw_only=True)
class LostContact:
    """One worker's word that it lost contact with others, in a group of ``peers`` (itself included)."""

    by: str
    reason: str
    of: tuple[str, ...] = ()
    """Those whom it could not reach, as far as it knows."""
    late: bool = False
    """Whether it waited for the whole timeout of the group; else a connection ended."""
    peers: tuple[str, ...] = ()
    step: int = -1
    """How many steps it has committed."""

    def to_json(self) -> bytes:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LostContact:
        record = _parse(data, "lost contact")
        try:
            found = cls(**{**record, "of": _ids(record["of"]), "peers": _ids(record["peers"])})
        except (TypeError, KeyError) as error:
            raise RecordError(f"lost contact record has unexpected fields: {error}") from error
        types = (type(found.by), type(found.reason), type(found.step), type(found.late))
        if types != (str, str, int, bool):
            raise RecordError(f"lost contact record has fields of other types: {data[:80]!r}")
        return found


def _ids(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RecordError(f"expected a list of worker ids, got {str(value)[:80]!r}")
    return tuple(value)


def _parse(data: bytes, kind: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{kind} record is not JSON: {data[:80]!r}") from error
    if not isinstance(record, dict) or record.pop("v", None) != VERSION:
        raise RecordError(f"{kind} record has an unknown version; expected {VERSION}: {data[:80]!r}")
    return record
