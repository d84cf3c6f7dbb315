"""Defines the records by which agents agree on who is in a generation, and tell their workers.

A generation's ``Members`` are written once, by the leading agent; agents read the nodes in it, workers the workers.
``Broken`` ends a generation for both.

How a heal goes: a worker dies -> its agent writes ``broken_key(g)`` -> survivors drop their step and wait for
``members_key(g + 1)`` -> the agents agree on g+1 and write it -> survivors and replacements (started with
``PHALANX_GENERATION=g+1``) form the group of g+1 in ``group_prefix(job, g + 1)``. A newcomer that can wait leads to
``wanted_key(g)`` instead: workers regroup at the next step boundary. A worker that leaves politely writes
``leaving_key(g, worker_id)``; its agent plans g+1 without it and breaks g once the worker has exited with code 0.
All this needs workers that take part: one that will says so by ``regroups_key(worker_id)`` before its first step. Where
nobody of a role has, agents do not heal but start all workers anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

from phalanx._fields import Fields, short
from phalanx.protocol._codec import RecordError, StoreRecord, at_least, dump_record, parse_record

MAX_LOCAL_SIZE = 65_536


@dataclass(frozen=True, kw_only=True)
class NodeRecord(StoreRecord):
    """A live node. It wants to be in a generation numbered at least ``wants``."""

    what: ClassVar[str] = "node record"

    id: str
    ticket: int = at_least(0)
    host: str
    addr: str
    port: int = at_least(0)
    local_size: int = at_least(0)
    wants: int = 0
    worker_ids: tuple[str, ...] = ()
    topology: str = ""
    fixed_rank: int = at_least(-1, default=-1)
    role: str = ""
    last_choice: bool = False
    """Whether its workers died again and again, or were wrong: it is taken only if there are too few others."""

    @classmethod
    def from_fields(cls, record: Fields) -> NodeRecord:
        _check_local_size(record.integer("local_size", low=0))
        return super().from_fields(record)


class MemberNode(NamedTuple):
    """A node of a generation; its rank is its index among them."""

    id: str
    ticket: int
    host: str
    addr: str
    port: int
    local_size: int
    topology: str = ""
    role: str = ""
    worker_ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: NodeRecord) -> MemberNode:
        return cls(*(getattr(node, name) for name in cls._fields))


class NodeInfo(NamedTuple):
    """One node of a generation. ``base_rank`` is the global rank of its first worker."""

    id: str
    host: str
    addr: str
    local_size: int
    base_rank: int
    topology: str = ""
    worker_ids: tuple[str, ...] = ()
    """Of length ``local_size``; what the agent passed to ``set_local_size``, or made from ``id``."""
    role: str = ""
    """Of all its workers; what the agent passed to ``set_local_size``."""


class Member(NamedTuple):
    """One worker of a generation."""

    id: str
    rank: int
    node_rank: int
    local_rank: int
    local_size: int
    host: str


@dataclass(frozen=True)
class Members(StoreRecord):
    """Who is in a generation: its nodes in the order of their ranks, and by them its workers.

    >>> node = MemberNode("n", 1, "host", "10.0.0.1", 29500, 2, worker_ids=("n.a", "n.b"))
    >>> [(worker.id, worker.rank) for worker in Members(3, (node,)).workers]
    [('n.a', 0), ('n.b', 1)]
    """

    what: ClassVar[str] = "members record"

    generation: int
    nodes: tuple[MemberNode, ...]

    @classmethod
    def forgotten(cls, generation: int) -> Members:
        """Return what takes the place of an old record: its key has to stay taken, so that it is never decided
        twice."""
        return cls(generation, ())

    @property
    def is_forgotten(self) -> bool:
        return not self.nodes

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def master_addr(self) -> str:
        """Return where the workers' bootstrap store is, or will be: on the first node."""
        return self.nodes[0].addr if self.nodes else ""

    @property
    def master_port(self) -> int:
        return self.nodes[0].port if self.nodes else 0

    def rank_of(self, node_id: str, ticket: int) -> int | None:
        """Return the rank of a registration of a node, or None."""
        for rank, node in enumerate(self.nodes):
            if node.id == node_id and node.ticket == ticket:
                return rank
        return None

    def worker_ids(self, rank: int) -> tuple[str, ...]:
        """Return the ids of the workers of the node at ``rank``: those that its agent gave them, else made from its
        own."""
        node = self.nodes[rank]
        return node.worker_ids or tuple(f"{node.id}.{self.generation}.{i}" for i in range(node.local_size))

    @cached_property
    def node_infos(self) -> tuple[NodeInfo, ...]:
        """Return the nodes as agents see them, with the global rank of each one's first worker."""
        found: list[NodeInfo] = []
        base_rank = 0
        for rank, node in enumerate(self.nodes):
            ids = self.worker_ids(rank)
            found.append(
                NodeInfo(node.id, node.host, node.addr, node.local_size, base_rank, node.topology, ids, node.role)
            )
            base_rank += node.local_size
        return tuple(found)

    @cached_property
    def workers(self) -> tuple[Member, ...]:
        """In the order of their ranks."""
        found: list[Member] = []
        for node_rank, node in enumerate(self.nodes):
            for local_rank, worker_id in enumerate(self.worker_ids(node_rank)):
                found.append(Member(worker_id, len(found), node_rank, local_rank, node.local_size, node.host))
        return tuple(found)

    def to_json(self) -> bytes:
        return dump_record({"generation": self.generation, "nodes": self.nodes})

    @classmethod
    def from_json(cls, data: bytes) -> Members:
        """``RecordError`` when it is none."""
        return _parse_members(data)


@lru_cache(maxsize=4)  # nodes that share a process (simulations, several agents in tests) parse a record once
def _parse_members(data: bytes) -> Members:
    record = parse_record(data, Members.what)
    nodes = tuple(_parse_node(row) for row in record.items("nodes"))
    return Members(record.integer("generation", low=0), nodes)


def _parse_node(row: Any) -> MemberNode:
    names = MemberNode._fields
    if not isinstance(row, list) or len(row) != len(names):
        raise RecordError(f"members record has a node {short(row)}; expected {len(names)} fields")
    node = Fields(dict(zip(names, row, strict=True)), Members.what, RecordError)
    return MemberNode(
        id=node.text("id"),
        ticket=node.integer("ticket", low=0),
        host=node.text("host"),
        addr=node.text("addr"),
        port=node.integer("port", low=0),
        local_size=_check_local_size(node.integer("local_size", low=0)),
        topology=node.text("topology"),
        role=node.text("role"),
        worker_ids=node.texts("worker_ids"),
    )


def _check_local_size(size: int) -> int:
    """Return a node lists its workers by name: a size that no machine has would fill the memory of all others."""
    if size > MAX_LOCAL_SIZE:
        raise RecordError(f"a node of {size} workers; expected at most {MAX_LOCAL_SIZE}")
    return size


@dataclass(frozen=True)
class LeaderRecord(StoreRecord):
    """The registration that decides, and the rules that it goes by."""

    what: ClassVar[str] = "leader record"

    id: str
    ticket: int = at_least(0)
    min_nodes: int = at_least(0)
    max_nodes: int = at_least(0)


@dataclass(frozen=True, kw_only=True)
class Broken(StoreRecord):
    """Why a generation ends, and which workers are known to be gone.

    ``at_once``: the step under way cannot be finished, although nobody is known to be gone.
    """

    what: ClassVar[str] = "broken record"

    reason: str
    workers: tuple[str, ...] = ()
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Closing(StoreRecord):
    """The end of a job: ``outcome`` is ``succeeded``, ``failed`` or empty (whoever closed it did not say)."""

    what: ClassVar[str] = "closing record"

    reason: str
    outcome: str = ""
    time: float = 0.0
    """In seconds since 1970, by the clock of the node that closed it."""
