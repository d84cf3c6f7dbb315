"""Looks at, and talks to, other ranks: the only part of the samplers that does.

Owns the defaults that come from the current group, and the check that all ranks' samplers agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.comm import Group


class SamplerMismatch(PhalanxError, RuntimeError):
    """The samplers of the ranks of a group do not belong together; the message says who differs in what."""


def current_group() -> Group:
    from phalanx import comm  # start-up: a sampler with explicit numbers needs no torch.distributed

    return comm.current_group()


def place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """(num_replicas, rank), with what is not given taken from the current group."""
    if num_replicas is None or rank is None:
        group = current_group()
        num_replicas = group.size if num_replicas is None else num_replicas
        rank = group.rank if rank is None else rank
    return num_replicas, rank


def check_agreement(mine: Mapping[str, Any], taken: Iterable[int], num_parts: int, group: Group | None) -> None:
    """Raise ``SamplerMismatch`` unless all ranks have equal ``mine`` and each part is ``taken`` by one.

    Collective: every rank of the group calls it. All ranks see the same values, so all raise or none.
    """
    group = current_group() if group is None else group
    everyone = group.all_gather_values({"mine": dict(mine), "taken": list(taken)})
    problems = disagreements(everyone, num_parts)
    if problems:
        raise SamplerMismatch(
            f"samplers disagree (seen on rank {group.rank} of {group.size}): {'; '.join(problems)}. Build "
            "them with the same arguments, and load the same state on every rank"
        )


def disagreements(everyone: Sequence[Mapping[str, Any]], num_parts: int) -> list[str]:
    """Return what is wrong among the ranks' values, in words; nothing if they belong together."""
    problems = [
        f"rank {rank} has {name}={_said(theirs['mine'].get(name))}, rank 0 has {name}={_said(value)}"
        for name, value in everyone[0]["mine"].items()
        for rank, theirs in enumerate(everyone)
        if theirs["mine"].get(name) != value
    ]
    for part in range(num_parts):
        takers = [rank for rank, theirs in enumerate(everyone) if part in theirs["taken"]]
        if len(takers) != 1:
            problems.append(f"part {part} of {num_parts} is taken by ranks {takers}, expected one")
    return problems


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
