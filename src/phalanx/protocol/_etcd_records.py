"""Defines the records by which agents find, begin and keep an etcd of the job's own.

``ClusterRecord`` lies in the small stores at the job's endpoints, the others in the etcd itself. What is done with them
is decided in ``phalanx.launch.rendezvous``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phalanx.protocol._codec import StoreRecord


@dataclass(frozen=True, kw_only=True)
class ClusterRecord(StoreRecord):
    """What an endpoint says of a cluster: the node that began it, when (seconds since 1970), where its members are.

    >>> one, two = (ClusterRecord(founder=each, began=7.0, members=()) for each in "ab")
    >>> one.is_elder_than(two), two.is_elder_than(one), one.is_elder_than(one)
    (True, False, False)
    """

    what: ClassVar[str] = "cluster record"

    founder: str
    began: float
    members: tuple[str, ...]

    def is_elder_than(self, other: ClusterRecord) -> bool:
        """Return which of two clusters stays; all nodes have the same opinion, whatever their clocks say."""
        return (self.began, self.founder) < (other.began, other.founder)


@dataclass(frozen=True, kw_only=True)
class EtcdOffer(StoreRecord):
    """Where a node would run, or runs, its member: the addresses for other members and for clients."""

    what: ClassVar[str] = "etcd offer"

    peer: str
    client: str
    leaves: bool = False
    """Whether the node leaves, and waits until its member is taken out."""


@dataclass(frozen=True, kw_only=True)
class EtcdRequest(StoreRecord):
    """Asks a node to start a member: its id, and what it is told of the others, as ``--initial-cluster`` has it."""

    what: ClassVar[str] = "etcd request"

    member: str
    cluster: str
