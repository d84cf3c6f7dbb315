"""Decides after the last step who has which rank, whose script has ended, which ranks are vacant. Pure.

All workers of the last round have the final state; each goes on with what its script does after the loop, under the
rank that it had (``if job.rank == 0: torch.save(...)``). The job is done when all of these scripts have ended. A worker
that dies before leaves its rank *vacant*: a newcomer claims it, takes the final state from one that keeps it, and runs
what follows the loop. Ranks of the others never move: they may have passed the line that asks for theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.elastic.membership._rounds import Membership
from phalanx.protocol import Finish, RecordError

log = logging.getLogger(__name__)


def finish_of(membership: Membership, step: int, hosts: Mapping[str, str]) -> Finish:
    """Return the record of a job's end, written by the workers of its last round."""
    return Finish(
        generation=membership.generation,
        round=membership.round,
        step=step,
        workers=membership.workers,
        hosts=tuple(hosts.get(worker, "") for worker in membership.workers),
    )


def parse_finish(data: bytes | None) -> Finish | None:
    """Return the record, or None when there is none; what is not a record of ours is as good as none, and is named."""
    if data is None:
        return None
    try:
        return Finish.from_json(data)
    except RecordError as error:
        log.warning("the record of the job's end is not one: %s", error)
        return None


@dataclass(frozen=True)
class Vacant:
    """A rank whose worker is gone before its script had ended, and who had it."""

    rank: int
    worker: str


def find_vacant(holders: Sequence[str], ended: Collection[str], members: Collection[str]) -> list[Vacant]:
    """Ranks that nobody has any more: the script of their holder has not ended, and it is no member of the job.

    >>> find_vacant(["a", "b", "c"], ended={"c"}, members={"b", "x"})
    [Vacant(rank=0, worker='a')]
    """
    return [
        Vacant(rank, worker) for rank, worker in enumerate(holders) if worker not in ended and worker not in members
    ]


def prefer(vacant: Sequence[Vacant], hosts: Sequence[str], host: str) -> list[Vacant]:
    """Return the order in which a newcomer on ``host`` claims: ranks of its own host first (files may lie there).

    >>> [v.rank for v in prefer([Vacant(0, "a"), Vacant(2, "c")], ["h1", "h1", "h2"], "h2")]
    [2, 0]
    """
    return sorted(vacant, key=lambda v: (v.rank >= len(hosts) or hosts[v.rank] != host, v.rank))
