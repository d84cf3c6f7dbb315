"""Decides what the workers of a new round do about a step that a loss has cut short.

Pure: everybody decides from the same reports. It relies on the commit protocol's invariants: the commit point is a
collective that is entered when prepared (the reduced gradients of all cells that one holds and the step's numbers are
here) and followed by the update; so if anybody has applied step s, everybody was prepared for s, and versions differ by
at most one. What a worker says of itself alone counts: a cell is held by those that say they hold all of it at their
version, not by those that somebody expects to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.elastic.sharded._holdings import Holdings
from phalanx.errors import PhalanxError


class NotPrepared(PhalanxError):
    """A worker cannot follow one that has applied a step: the commit protocol was broken."""


@dataclass(frozen=True)
class StateReport:
    """What a worker says of itself after a loss."""

    worker: str
    version: int | None = None
    """Committed steps that all of its cells contain; None: it is new and has no state."""
    prepared: int | None = None
    """The step for which it has the reduced gradients of its cells and the numbers; it would make its version one
    more."""
    held: tuple[int, ...] = ()
    """Cells that it has completely, at its version."""
    owned: tuple[int, ...] = ()
    """Those of them that it owned."""


@dataclass(frozen=True)
class RollForward:
    """``source`` has applied a step that ``behind`` have not: they apply it too, with its numbers."""

    source: str
    behind: tuple[str, ...]
    version: int
    holdings: Holdings


@dataclass(frozen=True)
class Repeat:
    """Nobody has applied more than the others: all go on with step ``version``."""

    version: int
    holdings: Holdings


@dataclass(frozen=True)
class Resume:
    """No worker holds the cells ``lost``: all take the last save. ``version`` is where they were; None: all are new."""

    lost: tuple[int, ...]
    version: int | None


def choose_recovery(reports: Sequence[StateReport], num_cells: int) -> RollForward | Repeat | Resume:
    """Decide from the reports of all workers of the round, in their order.

    >>> ahead, behind = StateReport("a", 5, None, (0,), (0,)), StateReport("b", 4, 4, (0, 1), (1,))
    >>> choose_recovery([ahead, behind], 2)
    RollForward(source='a', behind=('b',), version=5, holdings=Holdings(holders=(('a', 'b'), ('b',))))
    >>> choose_recovery([behind], 2)
    Repeat(version=4, holdings=Holdings(holders=(('b',), ('b',))))
    >>> choose_recovery([ahead], 2)
    Resume(lost=(1,), version=5)
    """
    known = [(report.version, report) for report in reports if report.version is not None]
    if not known:
        return Resume(tuple(range(num_cells)), None)
    version = max(at for at, _ in known)
    source = next(report for at, report in known if at == version)
    behind = [report for at, report in known if at < version]
    for report in behind:
        if report.version != version - 1 or report.prepared != report.version:
            raise NotPrepared(
                f"worker {source.worker} has committed {version} steps, {report.worker} {report.version} and is "
                f"prepared for {'none' if report.prepared is None else f'step {report.prepared}'}; expected the same "
                f"number, or one less and prepared for the step between. Resume the job from its last save"
            )
    holders = _holders([report for _, report in known], num_cells)
    lost = tuple(cell for cell, each in enumerate(holders) if not each)
    if lost:
        return Resume(lost, version)
    holdings = Holdings(holders)
    if not behind:
        return Repeat(version, holdings)
    return RollForward(source.worker, tuple(report.worker for report in behind), version, holdings)


def _holders(reports: Sequence[StateReport], num_cells: int) -> tuple[tuple[str, ...], ...]:
    """Return who holds each cell: who owned it first, then in the order of the workers."""
    owners: list[list[str]] = [[] for _ in range(num_cells)]
    mirrors: list[list[str]] = [[] for _ in range(num_cells)]
    for report in reports:
        owned = set(report.owned)
        for cell in report.held:
            (owners if cell in owned else mirrors)[cell].append(report.worker)
    return tuple((*first, *rest) for first, rest in zip(owners, mirrors, strict=True))
