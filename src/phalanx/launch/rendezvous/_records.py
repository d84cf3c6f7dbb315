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
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from phalanx._fields import Fields, load_json, short
from phalanx.launch.rendezvous._interface import NodeInfo
from phalanx.protocol import RecordError

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

MAX_LOCAL_SIZE = 65_536

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
    """Any JSON value; ``RecordError`` when it is none."""
    return load_json(data, what, RecordError)


def load_count(data: bytes, what: str) -> int:
    """A number that is at least 0; ``RecordError`` when it is none."""
    return Fields({"it": load(data, what)}, what, RecordError).integer("it", low=0)


def _fields(data: bytes, what: str) -> Fields:
    return Fields(load(data, what), what, RecordError)


def _plain(value: Any) -> str:
    """As text that can be printed and sent on, whatever it is."""
    text = value if isinstance(value, str) else short(value, 200)
    return text.encode(errors="replace").decode()


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
            record = load(data, "closing record")
        except RecordError:
            return cls(reason=data[:200].decode(errors="replace"))
        if not isinstance(record, dict):
            return cls(reason=short(record, 200))
        fields = Fields(record, "closing record", RecordError)
        try:
            moment = fields.number("time", default=0.0)
        except RecordError:
            moment = 0.0
        return cls(
            reason=_plain(fields.get("reason", ""))[:200] or "no reason was given",
            outcome=_plain(fields.get("outcome", "")),
            time=moment,
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
        """``RecordError`` when it is none."""
        record = _fields(data, "node record")
        return cls(
            id=record.text("id"),
            ticket=record.integer("ticket", low=0),
            host=record.text("host"),
            addr=record.text("addr"),
            port=record.integer("port", low=0),
            local_size=_local_size(record.integer("local_size", low=0)),
            wants=record.integer("wants", default=0),
            worker_ids=record.texts("worker_ids"),
            topology=record.text("topology", default=""),
            fixed_rank=record.integer("fixed_rank", low=-1, default=-1),
            role=record.text("role", default=""),
        )


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
    record = _fields(data, "generation record")
    seats = tuple(_parse_seat(row) for row in record.items("seats"))
    return GenerationRecord(record.integer("generation", low=0), seats)


def _parse_seat(row: Any) -> Seat:
    if not isinstance(row, list) or len(row) != len(Seat._fields):
        raise RecordError(f"generation record has a seat {short(row)}; expected {len(Seat._fields)} fields")
    seat = Fields(dict(zip(Seat._fields, row, strict=True)), "generation record", RecordError)
    return Seat(
        id=seat.text("id"),
        ticket=seat.integer("ticket", low=0),
        host=seat.text("host"),
        addr=seat.text("addr"),
        port=seat.integer("port", low=0),
        local_size=_local_size(seat.integer("local_size", low=0)),
        topology=seat.text("topology"),
        role=seat.text("role"),
        worker_ids=seat.texts("worker_ids"),
    )


def _local_size(size: int) -> int:
    """A node lists its workers by name: a size that no machine has would fill the memory of all others."""
    if size > MAX_LOCAL_SIZE:
        raise RecordError(f"a node of {size} workers; expected at most {MAX_LOCAL_SIZE}")
    return size


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
        """``RecordError`` when it is none."""
        record = _fields(data, "leader record")
        return cls(
            record.text("id"),
            record.integer("ticket", low=0),
            record.integer("min_nodes", low=0),
            record.integer("max_nodes", low=0),
        )
