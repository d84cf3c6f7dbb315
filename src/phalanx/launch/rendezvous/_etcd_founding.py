"""Decides who begins a job's own etcd, and which of two is given up: pure functions from what is seen at an endpoint.

Owns the rules. Only the agent that serves the first endpoint begins a cluster, and not alone: as many nodes as the job
needs must wait there, none of which knows of a cluster. A node that returns to the first endpoint while others go on
without it therefore waits until one of them tells it where the cluster is, however long that takes. A job that may
run on one node has only the time to go by: its first node begins when nobody has told it anything for a while.

Should there be two nevertheless (a network that was cut, a job of one node or more), the members of the younger learn
of the elder at any endpoint, and give theirs up if the elder answers. Nobody gives up a cluster for a record of one
that is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from phalanx.protocol import ClusterRecord


class Founding(Enum):
    """What the agent at the first endpoint does next."""

    WAIT = "wait"
    JOIN = "join"
    BEGIN = "begin"


class RecordChoice(Enum):
    """What a member does about the record that it finds at an endpoint."""

    NOTHING = "nothing"
    WRITE = "write"
    GIVE_UP = "give up"


def decide_founding(
    known: ClusterRecord | None, *, num_fresh: int, waited: float, min_nodes: int, grace: float
) -> Founding:
    """Return what the first endpoint's agent does. ``num_fresh``: nodes that wait there and know of no cluster, itself
    among them; ``waited``: seconds since it serves the endpoint.

    >>> decide_founding(None, num_fresh=1, waited=900.0, min_nodes=2, grace=3.0).value
    'wait'
    >>> decide_founding(None, num_fresh=2, waited=3.0, min_nodes=2, grace=3.0).value
    'begin'
    """
    if known is not None:
        return Founding.JOIN
    return Founding.BEGIN if num_fresh >= min_nodes and waited >= grace else Founding.WAIT


def decide_telling(
    own: ClusterRecord, found: ClusterRecord | None, *, acts: bool, answers: Callable[[ClusterRecord], bool]
) -> RecordChoice:
    """Return what a member of ``own`` does at an endpoint that says ``found``. ``acts``: it is the one that makes
    changes, so that it knows best who the members are. ``answers`` asks another cluster whether it lives."""
    if found is None:
        return RecordChoice.WRITE
    if found.founder == own.founder:
        return RecordChoice.WRITE if acts and found.members != own.members else RecordChoice.NOTHING
    if own.is_elder_than(found) or not answers(found):
        return RecordChoice.WRITE
    return RecordChoice.GIVE_UP
