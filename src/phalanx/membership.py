"""The contract between an agent and its workers: environment names, store keys, and the records behind them.

Owns values only; nothing here talks to a store. Agents write these records, workers read them, neither imports the
other. All keys live in the namespace ``job_prefix(job)`` of the job's store; records are JSON with a version number.

How a heal goes: a worker dies -> its agent sets ``broken_key(g)`` -> survivors drop their step and wait for
``members_key(g + 1)`` -> the agents agree on g+1 and write it -> survivors and replacements (started with
``PHALANX_GENERATION=g+1``) form the group of g+1 in ``group_prefix(job, g + 1)``. A newcomer that can wait sets
``wanted_key(g)`` instead: workers regroup at the next step boundary. A worker that leaves politely sets
``leaving_key(g, worker_id)``; its agent plans g+1 without it and breaks g once the worker has exited with code 0.
All this needs workers that take part: one that will says so by ``regroups_key(worker_id)`` before its first step. Where
nobody of a role has, agents do not heal but start all workers anew.
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

ENV_EXIT_CODE = "PHALANX_EXIT_CODE"
"""Set in a worker when its script has ended, before functions registered with ``atexit`` run: the code it ends with."""

FINISHING = "finishing"
"""Present, and not empty, when the workers have done all steps and only run what their scripts do after them."""

SETBACKS = "setbacks"
"""JSON of ``Setbacks``: how often the job went back to an earlier step."""


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


def regroups_key(worker_id: str) -> str:
    """Present when the worker follows ``members_key`` from generation to generation, and so can outlive its peers."""
    return f"regroups/{worker_id}"


def progress_key(worker_id: str) -> str:
    """JSON ``{"step": n}``, rewritten by a worker when it makes progress; ``n`` counts over the whole job. Agents tell
    by it who hangs, and whether workers die again and again without a step in between."""
    return f"progress/{worker_id}"


def ended_key(worker_id: str) -> str:
    """Present when a worker's script has ended well; the process may stay for a while to hand over its state."""
    return f"ended/{worker_id}"


def wish_key(node_id: str) -> str:
    """How many workers a node should run, as decimal text; its agent grows or shrinks the node accordingly."""
    return f"wish/{node_id}"


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
    """Why a generation ends, and which workers are known to be gone."""

    reason: str
    workers: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Broken:
        record = _parse(data, "broken")
        return cls(reason=record["reason"], workers=tuple(record["workers"]))


@dataclass(frozen=True, kw_only=True)
class Setbacks:
    """How often all workers were lost and the job went back, how many steps were computed again for it, and the
    last time from which step to which."""

    count: int = 0
    num_steps: int = 0
    last_from: int = 0
    last_to: int = 0

    def to_json(self) -> bytes:
        return json.dumps({"v": VERSION, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Setbacks:
        record = _parse(data, "setbacks")
        try:
            return cls(**{name: int(record[name]) for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"setbacks record has unexpected fields: {data[:80]!r}") from error

    def plus(self, before: int, after: int) -> Setbacks:
        """One more, from step ``before`` to step ``after``.

        >>> Setbacks().plus(57, 50)
        Setbacks(count=1, num_steps=7, last_from=57, last_to=50)
        """
        return Setbacks(
            count=self.count + 1,
            num_steps=self.num_steps + before - after,
            last_from=before,
            last_to=after,
        )


def _parse(data: bytes, kind: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except ValueError as error:
        raise RecordError(f"{kind} record is not JSON: {data[:80]!r}") from error
    if not isinstance(record, dict) or record.pop("v", None) != VERSION:
        raise RecordError(f"{kind} record has an unknown version; expected {VERSION}: {data[:80]!r}")
    return record
