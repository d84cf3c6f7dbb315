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
Contact that is lost while nobody dies only workers can see: each writes ``contact_key(g, worker_id)``, then
``any_contact_key(g)``, and the agents decide who, if anybody, is replaced (``phalanx.launch.recovery._contact``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from phalanx._fields import Fields, load_json

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


def contact_key(generation: int, worker_id: str) -> str:
    """JSON of ``LostContact``: what the worker saw when it lost contact with others of the generation."""
    return f"gen/{generation}/contact/by/{worker_id}"


def any_contact_key(generation: int) -> str:
    """Present when some worker of the generation has written ``contact_key``; the one key that agents look at."""
    return f"gen/{generation}/contact/any"


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

    @classmethod
    def from_record(cls, value: Any) -> Member:
        """``RecordError`` when it is none."""
        record = Fields(value, "member", RecordError)
        return cls(
            id=record.text("id"),
            rank=record.integer("rank", low=0),
            node_rank=record.integer("node_rank", low=0),
            local_rank=record.integer("local_rank", low=0),
            local_size=record.integer("local_size", low=0),
            host=record.text("host"),
            pid=record.integer("pid", default=0),
        )


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
        """``RecordError`` when it is none."""
        record = parse_record(data, "members record")
        return cls(
            generation=record.integer("generation", low=0),
            workers=tuple(Member.from_record(worker) for worker in record.items("workers")),
            num_nodes=record.integer("num_nodes", low=0),
            master_addr=record.text("master_addr"),
            master_port=record.integer("master_port", low=0),
        )


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
        """``RecordError`` when it is none."""
        record = parse_record(data, "broken record")
        return cls(
            reason=record.text("reason"),
            workers=record.texts("workers", default=[]),
            at_once=record.flag("at_once", default=False),
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
        """``RecordError`` when it is none."""
        record = parse_record(data, "lost contact record")
        return cls(
            by=record.text("by"),
            reason=record.text("reason"),
            of=record.texts("of"),
            late=record.flag("late"),
            peers=record.texts("peers"),
            step=record.integer("step"),
        )


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
        """``RecordError`` when it is none."""
        record = parse_record(data, "setbacks record")
        return cls(**{name: record.integer(name, low=0) for name in cls.__dataclass_fields__})

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


def parse_record(data: bytes, kind: str) -> Fields:
    """The fields of a versioned record; ``RecordError`` when it is none of this release."""
    record = Fields(load_json(data, kind, RecordError), kind, RecordError)
    if record.get("v") != VERSION:
        raise RecordError(f"{kind} has an unknown version; expected {VERSION}: {data[:80]!r}")
    return record
