"""After the last step: who has which rank, whose script has ended, which ranks are vacant. Values and pure decisions.

All workers of the last round have the final state; each goes on with what its script does after the loop, under the
rank that it had (``if job.rank == 0: torch.save(...)``). The job is done when all of these scripts have ended. A worker
that dies before leaves its rank *vacant*: a newcomer claims it, takes the final state from one that keeps it, and runs
what follows the loop. Ranks of the others never move: they may have passed the line that asks for theirs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx._fields import Fields, load_json, short
from phalanx.elastic.membership._rounds import Seat
from phalanx.protocol import RecordError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The last round of a job; ``workers`` and their ``hosts`` are in the order of their ranks."""

    generation: int
    round: int
    step: int
    workers: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, seat: Seat, step: int, hosts: Mapping[str, str]) -> Finish:
        return cls(
            generation=seat.generation,
            round=seat.round,
            step=step,
            workers=seat.workers,
            hosts=tuple(hosts.get(worker, "") for worker in seat.workers),
        )

    def to_json(self) -> bytes:
        return json.dumps(
            [self.generation, self.round, self.step, list(self.workers), list(self.hosts)]
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Finish:
        """``RecordError`` when it is none."""
        names = ("generation", "round", "step", "workers", "hosts")
        row = load_json(data, "finish record", RecordError)
        if not isinstance(row, list) or len(row) != len(names):
            raise RecordError(f"finish record is {short(row)}; expected {len(names)} fields")
        record = Fields(dict(zip(names, row, strict=True)), "finish record", RecordError)
        return cls(
            generation=record.integer("generation", low=0),
            round=record.integer("round", low=0),
            step=record.integer("step", low=0),
            workers=record.texts("workers"),
            hosts=record.texts("hosts"),
        )

    @classmethod
    def parse(cls, data: bytes | None) -> Finish | None:
        """The record, or None when there is none; what is not a record of ours is as good as none, and is named."""
        if data is None:
            return None
        try:
            return cls.from_json(data)
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
        Vacant(rank, worker)
        for rank, worker in enumerate(holders)
        if worker not in ended and worker not in members
    ]


def prefer(vacant: Sequence[Vacant], hosts: Sequence[str], host: str) -> list[Vacant]:
    """The order in which a newcomer on ``host`` claims: ranks of its own host first (files may lie there).

    >>> [v.rank for v in prefer([Vacant(0, "a"), Vacant(2, "c")], ["h1", "h1", "h2"], "h2")]
    [2, 0]
    """
    return sorted(vacant, key=lambda v: (v.rank >= len(hosts) or hosts[v.rank] != host, v.rank))
