"""Moves cells while everybody trains: new copies of those that lost one, cells for newcomers, balance.

At a step boundary a *slice* of the plan that all workers have computed from the same holdings: as many bytes as cost
about ``SHARE`` of a step, from a holder to a new one, with all state of them. Where steps are short a slice costs more
than that, however small it is; then it is not made smaller, but the next ones wait for so many steps that it was
``SHARE`` of them. The new holder takes part from the next step on. Who gives a copy away keeps it for one more step at
least: until then nobody knows that the new holder has it.

A slice that a loss cuts short changes nothing but what some new holders have received completely, which they claim in
the next round; the plan is then made anew.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.comm import Group
from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.elastic.sharded._assignment import with_even_owners
from phalanx.elastic.sharded._cell_reports import tell_holdings
from phalanx.elastic.sharded._cell_store import CellStore, Fragment
from phalanx.elastic.sharded._holdings import Holdings, LostCells, Transfer, after_loss
from phalanx.elastic.sharded._transfer_plan import transfers
from phalanx.events._event_types import CellsMoved

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding

SHARE = 0.08
"""Of the time of steps, for slices."""
LEAST_SLICE = 1 << 20
"""Bytes of parameters in a slice of short steps, and while nobody knows how long one takes: a slice costs some
milliseconds, with few bytes too."""
MOST_BUDGETS = 4
"""In a slice, where they are the rest of sections that were begun."""
MOST_STEPS = 20
"""From one slice to the next."""


def next_slice(
    plan: deque[Transfer], sizes: Sequence[int], sections: Sequence[object], budget: float
) -> list[Transfer]:
    """Take from the front of a plan what fits; at least one, and no cell twice: its next source has yet to receive it.

    Who receives a cell lays out its whole section anew, whatever else of it comes. So the rest of a section that was
    begun comes along, up to ``MOST_BUDGETS``; ``sections`` says for each cell which it is in.

    >>> plan = deque([Transfer(0, "a", "b"), Transfer(1, "a", "c"), Transfer(2, "b", "c")])
    >>> [transfer.cell for transfer in next_slice(plan, [10, 10, 10], "xyz", 25.0)], len(plan)
    ([0, 1], 1)
    >>> plan = deque([Transfer(0, "a", "b"), Transfer(1, "a", "c"), Transfer(2, "b", "c")])
    >>> [transfer.cell for transfer in next_slice(plan, [10, 10, 10], "xyy", 25.0)]
    [0, 1, 2]
    >>> plan = deque([Transfer(0, "a", "b"), Transfer(0, "b", "c")])
    >>> len(next_slice(plan, [10], "x", 100.0))
    1
    """
    found = [plan.popleft()]
    cells, total = {found[0].cell}, sizes[found[0].cell]
    begun = {sections[found[0].cell]}
    while plan and plan[0].cell not in cells:
        cell = plan[0].cell
        if total + sizes[cell] > budget * (MOST_BUDGETS if sections[cell] in begun else 1):
            break
        found.append(plan.popleft())
        cells.add(cell)
        begun.add(sections[cell])
        total += sizes[cell]
    return found


def budget_of(paces: Sequence[tuple[float, float]]) -> float:
    """Return the bytes of a slice from what workers tell: seconds of the last step, bytes a second of the last slice.

    >>> budget_of([(2.0, 0.0), (2.5, 1e9)])
    160000000.0
    >>> budget_of([(0.01, 1e6)]) == budget_of([]) == LEAST_SLICE
    True
    """
    rates = [rate for _, rate in paces if rate > 0]
    seconds = min((seconds for seconds, _ in paces), default=0.0)
    return max(SHARE * seconds * min(rates, default=0.0), float(LEAST_SLICE))


def steps_between(size: int, paces: Sequence[tuple[float, float]]) -> int:
    """Return how many steps there are from a slice of so many bytes to the next, from what workers tell after it.

    >>> steps_between(1000, [(0.5, 1e6), (0.5, 0.0)]), steps_between(1000, [(0.005, 1e6)]), steps_between(1000, [])
    (1, 3, 1)
    """
    rates = [rate for _, rate in paces if rate > 0]
    seconds = min((seconds for seconds, _ in paces), default=0.0)
    if not rates or seconds <= 0:
        return 1
    return min(MOST_STEPS, max(1, math.ceil(size / min(rates) / (SHARE * seconds))))


def given_up(holdings: Holdings, moved: Iterable[Transfer]) -> Holdings:
    """Return the holdings without the copies that were moved, whose places the new holders take.

    >>> given_up(Holdings((("a", "b", "c"),)), [Transfer(0, "a", "c", "a")])
    Holdings(holders=(('c', 'b'),))
    """
    holders = list(holdings.holders)
    for one in moved:
        if one.drop is not None:
            rest = [worker for worker in holders[one.cell] if worker != one.target]
            holders[one.cell] = tuple(one.target if worker == one.drop else worker for worker in rest)
    return Holdings(tuple(holders))


def is_possible(holdings: Holdings, one: Transfer) -> bool:
    """Return whether a transfer goes from a holder to a worker that does not hold the cell yet."""
    holders = holdings.holders[one.cell]
    return one.source in holders and one.target not in holders and (one.drop is None or one.drop in holders)


class Slices:
    """What is still to be moved in one group."""

    def __init__(self, sharding: JobSharding) -> None:
        self._sharding = sharding
        self._plan: deque[Transfer] | None = None
        self._moved: list[Transfer] = []
        self._size = 0
        """Bytes of the last slice."""
        self._settled_at = -1
        """The step behind which the last slice came, or workers were level."""
        self._has_even_owners = False
        self.rate = 0.0
        """Bytes of parameters a second in the last slice that this worker had a part in."""

    def begin(self, step: int) -> None:
        """Workers are level at ``step``: first comes a step, then a new plan."""
        self._plan, self._moved, self._settled_at, self._size = None, [], step, 0
        self._has_even_owners = False

    def run(self, step: int, paces: Sequence[tuple[float, float]]) -> None:
        """Between two steps: move the next slice. Raises as collectives do, with nothing changed here."""
        sharding = self._sharding
        holdings = sharding.holdings
        if holdings is None or step <= self._settled_at:
            return
        if step < self._settled_at + steps_between(self._size, paces):
            return
        if self._plan is None:
            self._plan = deque(transfers(sharding.table, holdings, sharding.workers, sharding.copies, sharding.nodes))
        if not self._plan and not self._moved:
            self._even_owners(holdings)
            return
        # Who is early waits here, as it would in the next gather: that is no cost of the slice, and counted as one it
        # would make slices small and rare.
        sharding.live_group.barrier()
        began = time.monotonic()
        sharding.collect()
        left = given_up(holdings, self._moved)
        slice_ = self._next(paces) if self._plan else []
        if not all(is_possible(left, one) for one in slice_):
            # Copies stay a step longer than the plan counts on; all workers see that, and plan anew from what is.
            slice_, self._plan = [one for one in slice_ if is_possible(left, one)], None
        received = carry(sharding.store, sharding.live_group, sharding.workers, slice_)
        sharding.settle(left.after([replace(one, drop=None) for one in slice_]), received)
        self._moved, self._settled_at = slice_, step
        self._size = sum(sharding.table.sizes[one.cell] for one in slice_)
        self._tell(slice_, time.monotonic() - began)

    def _next(self, paces: Sequence[tuple[float, float]]) -> list[Transfer]:
        assert self._plan, "something is to be moved"
        table = self._sharding.table
        sections = [(cell.unit, cell.section) for cell in table.cells]
        return next_slice(self._plan, table.sizes, sections, budget_of(paces))

    def _even_owners(self, holdings: Holdings) -> None:
        """When nothing is left to be moved, have workers own even shares again: mirrors took over from who was lost."""
        if self._has_even_owners:
            return
        self._has_even_owners = True
        sharding = self._sharding
        even = with_even_owners(sharding.table, holdings, sharding.workers)
        if even != holdings:
            sharding.settle(even)

    def _tell(self, moved: Sequence[Transfer], seconds: float) -> None:
        sharding = self._sharding
        mine = [one for one in moved if sharding.me in (one.source, one.target)]
        if not moved:
            tell_holdings(sharding)  # all has moved
        if mine:
            self.rate = self._size / max(seconds, 1e-6)
            sharding.job.events.write(
                CellsMoved(
                    step=sharding.job.step,
                    cells=len(mine),
                    bytes=sum(sharding.table.sizes[one.cell] for one in mine),
                    left=len(self._plan or ()),
                )
            )


def carry(store: CellStore, group: Group, workers: Sequence[str], moves: Sequence[Transfer]) -> list[Fragment]:
    """Send and receive cells; what this worker received. All workers go through the same pairs in the same order."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for move in moves:
        pairs.setdefault((move.source, move.target), []).append(move.cell)
    me = workers[group.rank]
    found: list[Fragment] = []
    for (source, target), cells in pairs.items():
        if me == source:
            send_state(group, {"fragments": list(map(_encode, store.cell_fragments(cells)))}, workers.index(target))
        elif me == target:
            got = receive_state(group, workers.index(source))
            found += map(_decode, got["fragments"])
    return found


def hand_over(sharding: JobSharding, leaving: Sequence[str]) -> None:
    """Copy the cells that only workers who leave hold to others; all workers call it."""
    assert sharding.holdings is not None, "the job has begun"
    staying = [worker for worker in sharding.workers if worker not in leaving]
    left = after_loss(sharding.holdings, staying)
    if not isinstance(left, LostCells) or not staying:
        return
    load = sharding.holdings.bytes_held(sharding.table, staying)
    moves = []
    for cell in left.cells:
        target = min(staying, key=lambda worker: load[worker])
        load[target] += sharding.table.sizes[cell]
        moves.append(Transfer(cell, sharding.holdings.holders[cell][0], target))
    sharding.collect()
    received = carry(sharding.store, sharding.live_group, sharding.workers, moves)
    sharding.settle(sharding.holdings.after(moves), received)
    sharding.live_group.barrier()  # nobody goes before all have what they were sent


def _encode(fragment: Fragment) -> dict[str, Any]:
    return {
        "key": list(fragment.key),
        "range": [fragment.begin, fragment.end],
        "values": fragment.values,
        "states": fragment.states,
    }


def _decode(found: dict[str, Any]) -> Fragment:
    u, s, p = found["key"]
    begin, end = found["range"]
    return Fragment((u, s, p), begin, end, found["values"], found["states"])
