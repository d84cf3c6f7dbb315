"""Says who is wrong: replicas that differ, replicas that drift apart, ranks that lost step.

Collective functions; their results and errors are the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.ddp.buckets._parameters import NamedParameter
from phalanx.ddp.reducer._rebuild import first_difference
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.comm import CommEvent, Group
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel


class ReplicaMismatch(PhalanxError, RuntimeError):
    """The ranks' modules are not the same: the message names the parameter and the ranks."""


class ReplicaDrift(PhalanxError, RuntimeError):
    """Replicas that should be equal are not any more. ``parameter`` and ``ranks`` say where."""

    def __init__(self, message: str, *, parameter: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.ranks = ranks


def verify_replicas(group: Group, members: Sequence[NamedParameter]) -> None:
    """Check that all ranks have the same parameters: number, names, order, shapes, dtypes, strides."""
    problem = first_difference(group.all_gather_values([member.describe() for member in members]))
    if problem is not None:
        raise ReplicaMismatch(
            f"rank {group.rank}: the ranks' models differ: {problem}; build it in the same way on every rank"
        )


def fingerprint(tensor: Tensor) -> int:
    """Return a number that changes with any bit of the tensor: the sum of its bits read as integers."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(width).sum(dtype=torch.int64))


def check_drift(group: Group, named: Sequence[tuple[str, Tensor]]) -> None:
    """Compare fingerprints over ranks; ``ReplicaDrift`` names the first tensor that differs and the odd ranks."""
    own = torch.tensor([fingerprint(tensor) for _, tensor in named], dtype=torch.int64)
    everyone = [torch.zeros_like(own) for _ in range(group.size)]
    group.all_gather(everyone, own)
    for place, (name, _) in enumerate(named):
        values = [int(prints[place]) for prints in everyone]
        if len(set(values)) > 1:
            common = max(values, key=lambda value: (values.count(value), -values.index(value)))
            odd = tuple(rank for rank, value in enumerate(values) if value != common)
            raise ReplicaDrift(
                f"rank {group.rank}: replicas drifted apart: {name!r} on rank {', '.join(map(str, odd))} differs from "
                f"the other ranks; look for updates outside the wrapper or unseeded randomness there",
                parameter=name,
                ranks=odd,
            )


def compare_replicas(ddp: DistributedDataParallel, active: int, *, counted: bool) -> None:
    """Look for drift if it is time to. Ranks without data cannot take part: then it waits until after ``join``.

    ``active`` ranks still have data; ``counted`` says that a join context told so.
    """
    group, every, steps = ddp.group, ddp.fingerprint_every, ddp._stats.steps
    if ddp._join_config.enable and not counted:
        raise RuntimeError(
            f"rank {group.rank}: fingerprint_every={every} inside Join needs this wrapper to be the first of the "
            "joinables: only the first learns how many ranks still have data"
        )
    if active == group.size and steps and steps % every == 0:
        check_drift(group, [(member.name, member.part) for member in ddp._scanner.members])


class CollectiveLog:
    """The last collectives of this rank, for reports after a desync. Attach with ``comm.observe``."""

    def __init__(self, length: int = 16) -> None:
        self._events: deque[str] = deque(maxlen=length)
        self.count = 0

    def __call__(self, event: CommEvent) -> None:
        self.count += 1
        self._events.append(f"#{self.count} {event.name} of {event.nbytes} bytes (generation {event.group.generation})")

    @property
    def lines(self) -> list[str]:
        return list(self._events)


def desync_report(group: Group, lines: Sequence[str]) -> str:
    """Return what every rank did last, told over a group that works (e.g. the one that survivors re-formed)."""
    everyone = group.all_gather_values(list(lines))
    return "\n".join(
        f"rank {rank}: " + ("; ".join(map(str, said[-5:])) if said else "no collective yet")
        for rank, said in enumerate(everyone)
    )
