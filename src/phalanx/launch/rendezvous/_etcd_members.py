"""Decides which nodes of a job run a member of its own etcd: pure functions from what is known to one change.

Owns the rules. A cluster begins with one member and grows, one learner at a time, to an odd number of voters: one more
would survive no further loss. With two nodes there is one voter: of two, either's loss would end the store. Who acts is
the first living voter; changes may be made twice without harm, because etcd refuses the second.

Assumptions: a node that is not among ``living`` is lost or leaves, and comes back as a new member. One that leaves
keeps its member until it is taken out, so that its vote still counts for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Where a node would run its member: the addresses for other members and for clients."""

    node: str
    peer: str
    client: str


@dataclass(frozen=True, kw_only=True)
class EtcdMember:
    """A member as etcd lists it. ``node`` is empty when it was added and has never been started."""

    id: str
    node: str
    peer: str
    client: str = ""
    is_learner: bool = False


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    """One thing to do to the cluster: ``add`` an offer as a learner, ``promote`` or ``remove`` a member."""

    add: Offer | None = None
    promote: EtcdMember | None = None
    remove: EtcdMember | None = None
    why: str = ""


def next_change(
    members: Sequence[EtcdMember],
    living: Sequence[Offer],
    size: int,
    unfit: Collection[str] = (),
    leaving: Collection[str] = (),
) -> MemberChange | None:
    """Return what to do next; None when all is as it should be.

    ``living`` is in the order in which the nodes came; ``unfit`` are nodes whose member could not be started;
    ``leaving`` those that have said that they leave and wait until their member is taken out.

    >>> offers = [Offer(node=n, peer=f"http://{n}:2", client=f"http://{n}:1") for n in "abc"]
    >>> one = [EtcdMember(id="1", node="a", peer="http://a:2")]
    >>> next_change(one, offers, 3).add.node, next_change(one, offers[:2], 3)
    ('b', None)
    """
    by_peer = {offer.peer: offer for offer in living}
    voters = [member for member in members if not member.is_learner]
    for learner in (member for member in members if member.is_learner):
        if learner.peer not in by_peer:
            return MemberChange(remove=learner, why="its node was lost before it could vote")
        if by_peer[learner.peer].node in unfit:
            return MemberChange(remove=learner, why="it could not be started")
        return MemberChange(promote=learner)
    lost = [voter for voter in voters if voter.peer not in by_peer]
    num_silent = sum(voter.node not in leaving for voter in lost)
    if lost and len(voters) - num_silent > len(voters) // 2:
        gone = min(lost, key=lambda voter: voter.node in leaving)  # the silent first: those that leave still vote
        return MemberChange(remove=gone, why="its node leaves" if gone.node in leaving else "its node was lost")
    peers = {member.peer for member in members}
    free = [offer for offer in living if offer.peer not in peers and offer.node not in unfit]
    wanted = wanted_voters(len(voters) - len(lost) + len(free), size)
    if len(voters) < wanted and free:
        return MemberChange(add=free[0])
    if len(voters) > wanted and not lost:
        order = [offer.peer for offer in living]
        newest = max(voters, key=lambda voter: order.index(voter.peer))
        return MemberChange(remove=newest, why=f"{len(voters)} members survive no more losses than {wanted}")
    return None


def wanted_voters(num_nodes: int, size: int) -> int:
    """Return how many voters so many usable nodes should have: odd, at most ``size``, at least one.

    >>> [wanted_voters(nodes, 3) for nodes in (1, 2, 3, 4, 9)], wanted_voters(4, 5)
    ([1, 1, 3, 3, 3], 3)
    """
    most = max(1, min(num_nodes, size))
    return most if most % 2 else most - 1


def acting_node(members: Sequence[EtcdMember], living: Sequence[Offer]) -> str:
    """Return the node that makes the changes: the first living one with a vote; empty when there is none."""
    votes = {member.peer for member in members if not member.is_learner}
    return next((offer.node for offer in living if offer.peer in votes), "")


def initial_cluster(members: Sequence[EtcdMember], offer: Offer) -> str:
    """Return what a new member is told of the others, and of itself, in the words of ``--initial-cluster``.

    >>> initial_cluster([EtcdMember(id="1", node="a", peer="http://a:2"), EtcdMember(id="2", node="", peer="http://b:2")],
    ...                 Offer(node="b", peer="http://b:2", client="http://b:1"))
    'a=http://a:2,b=http://b:2'
    """
    names = {member.peer: member.node or member.id for member in members} | {offer.peer: offer.node}
    return ",".join(f"{name}={peer}" for peer, name in names.items())


def read_members(answer: Mapping[str, Any]) -> list[EtcdMember]:
    """Return the members of an answer of etcd (``/v3/cluster/member/list``, ``add``, ``remove``)."""
    return [
        EtcdMember(
            id=str(found["ID"]),
            node=str(found.get("name", "")),
            peer=str((found.get("peerURLs") or [""])[0]),
            client=str((found.get("clientURLs") or [""])[0]),
            is_learner=bool(found.get("isLearner", False)),
        )
        for found in answer.get("members", [])
    ]
