"""The records of a rendezvous and the keys they live under.

Owns the shapes and their JSON; sealing (versions, signatures) is ``_signing``'s, meaning is ``_decide``'s.
All keys are in the job's namespace, under ``rdzv/``:

==================== ========================================================================================
``tickets``          counter; every registration of a node takes the next number
``live/node/<id>``   ``NodeRecord``, bound to the node's lease; only its node writes it
``gen/<g>``          ``GenerationRecord``; written once, by compare-and-set from absent: that write decides
``formed``           number of the newest generation, a hint: readers also look at the one after it
``ended/<g>/<kind>`` ``Broken``: generation g is over; kind is ``broken`` or ``wanted``
``leader``           ``LeaderRecord``: the node that decides
``waiting``          how many nodes could be admitted now
``closed``           ``Closing``: the job is over, how it ended, and when
``runs``             how often a job of this id was run anew; see ``_runs``
``proof``            empty, signed by the agent that made the job's secret: which of several it is
``bells``            counter; see below
``live/bell/<n>``    the n-th ring
==================== ========================================================================================

Who changes something that all nodes want to know (formed, ended, leader, closed) then *rings*: takes the next
number of ``bells`` and writes that bell. Nodes wait for the next bell, one key each, and on hearing it read
the records: what counts is their state, never the sequence of rings, so a ring that is lost or doubled does
no harm; nor does one of a stranger, who can only make nodes look. Only the leader
watches ``live/``: nodes that come and go wake nobody else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from phalanx.launch.rendezvous._interface import NodeInfo
from phalanx.membership import RecordError

TICKETS = "rdzv/tickets"
LIVE = "rdzv/live/"
NODES = "rdzv/live/node/"
FORMED = "rdzv/formed"
LEADER = "rdzv/leader"
WAITING = "rdzv/waiting"
CLOSED = "rdzv/closed"
PROOF = "rdzv/proof"
BELLS = "rdzv/bells"
RUNS = "rdzv/runs"

GONE = b"{}"
"""What an old generation's record is replaced with: its key must stay taken, so that it is never decided
twice."""


def node_key(node_id: str) -> str:
    return f"{NODES}{node_id}"


def generation_key(generation: int) -> str:
    return f"rdzv/gen/{generation}"


def ended_key(generation: int, kind: str) -> str:
    return f"rdzv/ended/{generation}/{kind}"


def bell_key(number: int) -> str:
    return f"rdzv/live/bell/{number}"


def stage_key(stage: str, generation: int, rank: int) -> str:
    """Written by the agent of the node at ``rank`` when it has come to a stage of its end: ``done`` (all its workers
    have succeeded), ``left`` (and it did not wait for the others) or ``failed``."""
    return f"agents/{stage}/{generation}/{rank}"


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def load(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise RecordError(f"{what} is not JSON: {data[:60]!r}") from error


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The end of a job: ``outcome`` is ``succeeded``, ``failed`` or empty (whoever closed it did not say)."""

    reason: str
    outcome: str = ""
    time: float = 0.0
    """In seconds since 1970, by the clock of the node that closed it."""

    def to_json(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> Closing:
        """Whatever was written closes the job; what is not a record of ours is taken for a reason."""
        try:
            record = json.loads(data)
        except ValueError:
            return cls(reason=data[:200].decode(errors="replace"))
        if not isinstance(record, dict):
            return cls(reason=str(record)[:200])
        moment = record.get("time")
        return cls(
            reason=str(record.get("reason", ""))[:200] or "no reason was given",
            outcome=str(record.get("outcome", "")),
            time=float(moment) if isinstance(moment, (int, float)) else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A live node. It wants to be in a generation numbered at least ``wants``."""

    id: str
    ticket: int
    host: str
    addr: str
    port: int
    local_size: int
    wants: int = 0
    worker_ids: tuple[str, ...] = ()
    topology: str = ""
    fixed_rank: int = -1
    role: str = ""

    def to_json(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> NodeRecord:
        record = load(data, "node record")
        try:
            return cls(**{**record, "worker_ids": tuple(record["worker_ids"])})
        except (TypeError, KeyError) as error:
            raise RecordError(f"node record has unexpected fields: {error}") from error

    def rejoin(self, wants: int, port: int) -> NodeRecord:
        return replace(self, wants=wants, port=port)


class Seat(NamedTuple):
    """A node's place in a generation; its rank is its index."""

    id: str
    ticket: int
    host: str
    addr: str
    port: int
    local_size: int
    topology: str
    role: str
    worker_ids: tuple[str, ...]

    @classmethod
    def of(cls, node: NodeRecord) -> Seat:
        return cls(
            node.id,
            node.ticket,
            node.host,
            node.addr,
            node.port,
            node.local_size,
            node.topology,
            node.role,
            node.worker_ids,
        )


@dataclass(frozen=True)
class GenerationRecord:
    """Who is in a generation, in the order of ranks."""

    generation: int
    seats: tuple[Seat, ...]

    def to_json(self) -> bytes:
        return dump({"generation": self.generation, "seats": self.seats})

    @classmethod
    def from_json(cls, data: bytes) -> GenerationRecord:
        return _parse_generation(data)

    def rank_of(self, node_id: str, ticket: int) -> int | None:
        """The rank of a registration of a node, or None."""
        for rank, seat in enumerate(self.seats):
            if seat.id == node_id and seat.ticket == ticket:
                return rank
        return None

    @cached_property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """The same as agents see it, with the global rank of each node's first worker."""
        nodes = []
        base_rank = 0
        for seat in self.seats:
            ids = seat.worker_ids or tuple(f"{seat.id}.{self.generation}.{i}" for i in range(seat.local_size))
            nodes.append(
                NodeInfo(
                    seat.id, seat.host, seat.addr, seat.local_size, base_rank, seat.topology, ids, seat.role
                )
            )
            base_rank += seat.local_size
        return tuple(nodes)


@lru_cache(maxsize=4)  # nodes that share a process (simulations, several agents in tests) parse a record once
def _parse_generation(data: bytes) -> GenerationRecord:
    record = load(data, "generation record")
    try:
        seats = tuple(Seat._make((*row[:-1], tuple(row[-1]))) for row in record["seats"])
        return GenerationRecord(record["generation"], seats)
    except (TypeError, KeyError) as error:
        raise RecordError(f"generation record has unexpected fields: {error}") from error


@dataclass(frozen=True)
class LeaderRecord:
    """The registration that decides, and the rules that it goes by."""

    id: str
    ticket: int
    min_nodes: int
    max_nodes: int

    def to_json(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LeaderRecord:
        record = load(data, "leader record")
        try:
            return cls(**record)
        except TypeError as error:
            raise RecordError(f"leader record has unexpected fields: {error}") from error
