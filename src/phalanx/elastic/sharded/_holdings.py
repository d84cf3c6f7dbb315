"""Holdings: which workers hold each cell, the owner first; what a loss leaves, and what it would cost, in words.

Pure values. The owner of a cell reduces its gradient and serves its values; the other holders (mirrors) repeat the
update. Who holds what is decided in ``_assignment``, what is done after a loss in ``_recovery_choice``.

Invariants: every cell has at least one holder; its holders are distinct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import Any, Literal

from phalanx._fields import Fields
from phalanx.elastic.sharded._cell_table import CellTable

Copies = int | Literal["all"]


@dataclass(frozen=True)
class Transfer:
    """A copy of a cell goes from one holder to a new one; afterwards ``drop`` (if any) no longer holds it.

    Without a ``drop`` the target is the last mirror, else it takes the place of whom it replaces.
    """

    cell: int
    source: str
    target: str
    drop: str | None = None


@dataclass(frozen=True)
class LostCells:
    """Cells that no survivor holds: the job goes back to its last save."""

    cells: tuple[int, ...]


@dataclass(frozen=True)
class Holdings:
    """The holders of each cell, by its index in the table, the owner first.

    >>> holdings = Holdings((("a", "b"), ("b", "a")))
    >>> holdings.owned_by("b"), holdings.held_by("a")
    ((1,), (0, 1))
    """

    holders: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for cell, each in enumerate(self.holders):
            if not each or len(set(each)) != len(each):
                raise ValueError(f"cell {cell} is held by {list(each)}; expected at least one, each named once")

    @cached_property
    def by_worker(self) -> dict[str, tuple[int, ...]]:
        """The cells of each worker that holds any."""
        found: dict[str, list[int]] = {}
        for cell, each in enumerate(self.holders):
            for worker in each:
                found.setdefault(worker, []).append(cell)
        return {worker: tuple(cells) for worker, cells in found.items()}

    def held_by(self, worker: str) -> tuple[int, ...]:
        return self.by_worker.get(worker, ())

    def owned_by(self, worker: str) -> tuple[int, ...]:
        return tuple(cell for cell in self.held_by(worker) if self.holders[cell][0] == worker)

    def bytes_held(self, table: CellTable, workers: Sequence[str]) -> dict[str, int]:
        """Bytes of parameters that each of ``workers`` holds."""
        return {worker: sum(table.sizes[cell] for cell in self.held_by(worker)) for worker in workers}

    def after(self, transfers: Collection[Transfer]) -> Holdings:
        """Return the holdings when these transfers have arrived."""
        holders = [list(each) for each in self.holders]
        for one in transfers:
            each = holders[one.cell]
            if one.source not in each or one.target in each:
                raise ValueError(f"{one} does not go from a holder to a new one; cell {one.cell} is held by {each}")
            if one.drop is None:
                each.append(one.target)
            else:
                each[each.index(one.drop)] = one.target
        return Holdings(tuple(map(tuple, holders)))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, each worker named once."""
        workers = list(self.by_worker)
        numbers = {worker: number for number, worker in enumerate(workers)}
        return {"workers": workers, "cells": [[numbers[worker] for worker in each] for each in self.holders]}

    @classmethod
    def from_json(cls, value: Any) -> Holdings:
        """Return the inverse of ``to_json``; ``ValueError`` for anything else."""
        fields = Fields(value, "holdings")
        workers, cells = fields.texts("workers"), fields.items("cells")
        for each in cells:
            if not isinstance(each, list) or not all(type(n) is int and 0 <= n < len(workers) for n in each):
                raise ValueError(f"holdings: {each!r} are no holders; expected numbers of {len(workers)} workers")
        return cls(tuple(tuple(workers[number] for number in each) for each in cells))


def after_loss(holdings: Holdings, survivors: Collection[str]) -> Holdings | LostCells:
    """Leave out who is lost: the first survivor of a cell's holders owns it, and no byte moves.

    >>> after_loss(Holdings((("a", "b"), ("b", "c"))), ["b", "c"])
    Holdings(holders=(('b',), ('b', 'c')))
    >>> after_loss(Holdings((("a", "b"), ("b", "c"))), ["c"])
    LostCells(cells=(0,))
    """
    left = tuple(tuple(worker for worker in each if worker in survivors) for each in holdings.holders)
    lost = tuple(cell for cell, each in enumerate(left) if not each)
    return LostCells(lost) if lost else Holdings(left)


def num_copies(copies: Copies, num_workers: int) -> int:
    """Return how many workers can hold each cell.

    >>> num_copies(2, 5), num_copies("all", 5), num_copies(3, 2)
    (2, 5, 2)
    """
    if copies != "all" and (type(copies) is not int or copies < 1):
        raise ValueError(f"copies is {copies!r}; expected 'all' or a number of at least 1")
    return num_workers if copies == "all" else min(copies, num_workers)


def node_of(nodes: Mapping[str, str], worker: str) -> str:
    """Return the node of a worker; one that is not named counts as its own."""
    return nodes.get(worker, worker)


def describe(
    table: CellTable, holdings: Holdings, workers: Sequence[str], copies: Copies, nodes: Mapping[str, str]
) -> str:
    """Say what each worker holds and what losses would cost.

    >>> from phalanx.elastic.sharded._cell_table import SectionShape, cell_table
    >>> table = cell_table([[SectionShape((4096,))]], whole_matrices=False)
    >>> describe(table, Holdings((("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"))), ["a", "b"], 2, {})
    'copies=2: 2 workers hold 100% of the state each. Any 1 loss costs nothing. The loss of 2 goes back to the last \
save in 1 of 1 cases'
    """
    total, size = max(1, sum(table.sizes)), len(workers)
    shares = sorted(100 * held / total for held in holdings.bytes_held(table, workers).values())
    low, high = f"{shares[0]:.3g}", f"{shares[-1]:.3g}"
    each = f"{high}%" if low == high else f"{low}% to {high}%"
    text = [f"copies={copies}: {_count(size, 'worker')} hold{'s' * (size == 1)} {each} of the state each"]
    sets = {frozenset(each) for each in holdings.holders}
    fewest = min((len(each) for each in sets), default=1)
    if fewest == 1:
        single = len({worker for each in sets if len(each) == 1 for worker in each})
        text.append(f"The loss of {'any' if single == size else f'{single} of {size}'} goes back to the last save")
    else:
        text.append(f"Any {_count(fewest - 1, 'loss')} cost{'s' * (fewest == 2)} nothing")
        fatal = sum(len(each) == fewest for each in sets)
        text.append(f"The loss of {fewest} goes back to the last save in {fatal} of {comb(size, fewest)} cases")
    text += _node_losses(holdings, workers, nodes, fewest)
    if copies != "all" and fewest < copies:
        text.append(f"Some cells have {fewest} of {_count(copies, 'copy')}")
    return ". ".join(text)


def _node_losses(holdings: Holdings, workers: Sequence[str], nodes: Mapping[str, str], fewest: int) -> list[str]:
    counts = Counter(node_of(nodes, worker) for worker in workers)
    if fewest == 1 or len(counts) == len(workers) or len(counts) == 1:
        return []
    on_one = {node_of(nodes, each[0]) for each in holdings.holders if len({node_of(nodes, w) for w in each}) == 1}
    if not on_one:
        return ["The loss of any node costs nothing"]
    return [f"The loss of node {' or '.join(sorted(on_one))} goes back to the last save"]


def _count(number: int, word: str) -> str:
    plural = {"loss": "losses", "copy": "copies"}.get(word, f"{word}s")
    return f"{number} {word if number == 1 else plural}"
