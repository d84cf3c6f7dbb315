"""Plans which copies of cells move after losses and joins: what is missing first, then what makes holdings even.

Pure: all workers compute the same plan from the same holdings, without a vote. A plan is made once after a regroup
and carried out in slices; made anew from any state in between it goes on from there. Planning takes milliseconds to
some tenths of a second (thousands of cells), so it has no place between a loss and the next step: ``after_loss``
alone has.

After one loss of an even assignment, what is moved is what the lost worker held. Even bytes and few bytes come before
few partners: after losses a worker may share cells with more than ``MAX_PARTNERS``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.elastic.sharded._cell_table import CellTable
from phalanx.elastic.sharded._holdings import Copies, Holdings, Transfer, node_of, num_copies

MAX_PARTNERS = 8
"""Workers with which one shares cells, while there is a choice."""


def transfers(
    table: CellTable, holdings: Holdings, workers: Sequence[str], copies: Copies, nodes: Mapping[str, str]
) -> tuple[Transfer, ...]:
    """Say which copies move, in order: lost ones first (most endangered cells first, sources taking turns), then
    those that spread cells over nodes or fill workers that hold less than others.

    ``holdings`` names ``workers`` only (``after_loss``), with at most ``copies`` for a cell (``trimmed``).
    """
    plan = TransferPlan(table, holdings, workers, num_copies(copies, len(workers)), nodes)
    plan.protect()
    first = _taking_turns(plan.moves, holdings)
    plan.moves = []
    plan.balance()
    return (*first, *plan.moves)


def _taking_turns(moves: Sequence[Transfer], holdings: Holdings) -> list[Transfer]:
    """Order moves by danger, then so that sources take turns.

    All cells get a second copy before any gets a third: a third may come from who has just received the second.
    """
    counts: dict[tuple[int, str], int] = {}
    holders: dict[int, int] = {}
    keyed = []
    for order, move in enumerate(moves):
        left = holders.get(move.cell, len(holdings.holders[move.cell]))
        holders[move.cell] = left + 1
        turn = counts[left, move.source] = counts.get((left, move.source), 0) + 1
        keyed.append((left, turn, order))
    return [moves[order] for _, _, order in sorted(keyed)]


class TransferPlan:
    """Holders while a plan is made: who holds how much, and who shares cells with whom."""

    def __init__(
        self, table: CellTable, holdings: Holdings, workers: Sequence[str], wanted: int, nodes: Mapping[str, str]
    ) -> None:
        self.sizes = table.sizes
        self.largest = max(table.sizes, default=0)
        self.workers = list(workers)
        self.places = {worker: place for place, worker in enumerate(workers)}
        self.nodes = {worker: node_of(nodes, worker) for worker in workers}
        self.wanted = wanted
        self.holders = [list(each) for each in holdings.holders]
        self.cells = {worker: set(holdings.held_by(worker)) for worker in workers}
        self.load = holdings.bytes_held(table, workers)
        self.even = wanted * sum(table.sizes) / max(1, len(self.workers))
        self.shared: dict[str, dict[str, int]] = {worker: {} for worker in workers}
        for each in self.holders:
            if not set(each) <= self.places.keys():
                raise ValueError(f"a cell is held by {each}; expected some of {self.workers} (after_loss leaves those)")
            for one in each:
                self._share(one, each, 1)
        self.sent = dict.fromkeys(workers, 0)
        self.moves: list[Transfer] = []

    def _share(self, worker: str, others: Sequence[str], by: int) -> None:
        mine = self.shared[worker]
        for other in others:
            if other != worker:
                mine[other] = mine.get(other, 0) + by
                if not mine[other]:
                    del mine[other]

    def _move(self, cell: int, target: str, drop: str | None) -> None:
        each, size = self.holders[cell], self.sizes[cell]
        # Whoever drops its copy sends it: it has the bytes, and the load is where it should shrink.
        source = drop if drop is not None else min(each, key=lambda w: (self.sent[w], self.places[w]))
        self.sent[source] += size
        self.moves.append(Transfer(cell, source, target, drop))
        if drop is not None:
            each[each.index(drop)] = target
            self.load[drop] -= size
            self.cells[drop].remove(cell)
            self._share(drop, each, -1)
            for other in each:
                if other != target:
                    self._share(other, [drop], -1)
        else:
            each.append(target)
        self.load[target] += size
        self.cells[target].add(cell)
        self._share(target, each, 1)
        for other in each:
            if other != target:
                self._share(other, [target], 1)

    def protect(self) -> None:
        """Give every cell that has fewer copies than wanted new ones, the most endangered first."""
        for cell in sorted(range(len(self.holders)), key=lambda cell: (len(self.holders[cell]), cell)):
            while len(self.holders[cell]) < self.wanted:
                targets = [worker for worker in self.workers if worker not in self.holders[cell]]
                self._move(cell, min(targets, key=lambda worker: self._cost_of_copy(cell, worker)), None)

    def _cost_of_copy(self, cell: int, worker: str) -> tuple[int, ...]:
        """Rank targets for a new copy. Who would hold more than its share comes last, or it had to move again."""
        each, load = self.holders[cell], self.load[worker]
        clashes, over = self._clashes(worker, each), load + self.sizes[cell] > self.even
        new_pairs = 0 if over else self._opens_pairs(worker, each)
        far_over = load + self.sizes[cell] > self.even + self.largest
        return (far_over, clashes, over, new_pairs, load, self.places[worker])

    def balance(self) -> None:
        """Move copies until nodes are as different and bytes as even as they can be."""
        for _ in range(4):  # evening out may open a way to spread, and the other way round
            count = len(self.moves)
            self._spread()
            self._even_out()
            if len(self.moves) == count:
                return

    def _spread(self) -> None:
        for cell, each in enumerate(self.holders):
            for holder in sorted(each, key=lambda w: (-self.load[w], self.places[w])):
                others = [worker for worker in each if worker != holder]
                if not self._clashes(holder, others):
                    continue
                size = self.sizes[cell]
                targets = [
                    worker
                    for worker in self.workers
                    if worker not in each
                    and not self._clashes(worker, others)
                    and (self.load[worker] + size <= self.load[holder] or self.load[worker] + size <= self.even)
                ]
                if targets:
                    self._move(cell, min(targets, key=lambda w: self._cost(w, cell, others)), holder)

    def _even_out(self) -> None:
        while (found := self._next_pair()) is not None:
            cell, heavy, light = found
            self._move(cell, light, heavy)

    def _next_pair(self) -> tuple[int, str, str] | None:
        """Return a copy that makes a heavy and a light worker more alike, one that keeps nodes apart if any."""
        by_load = sorted(self.workers, key=lambda w: (self.load[w], self.places[w]))
        last = {self.nodes[worker]: worker for worker in by_load}  # the heaviest of each node
        first = {self.nodes[worker]: worker for worker in reversed(by_load)}
        some = sorted(last.values(), key=by_load.index, reverse=True), sorted(first.values(), key=by_load.index)
        return self._pair_among(*some, clashes=0) or self._pair_among(by_load[::-1], by_load, clashes=1)

    def _pair_among(
        self, heavy_ones: Sequence[str], light_ones: Sequence[str], clashes: int
    ) -> tuple[int, str, str] | None:
        for heavy in heavy_ones:
            for light in light_ones:
                gap = self.load[heavy] - self.load[light]
                if gap <= self.largest:
                    break
                cells = [c for c in self.cells[heavy] - self.cells[light] if 0 < self.sizes[c] < gap]
                found = min(((self._cost_of_pair(cell, heavy, light), cell) for cell in cells), default=None)
                if found is not None and found[0][0] <= clashes:
                    return found[1], heavy, light
        return None

    def _cost_of_pair(self, cell: int, heavy: str, light: str) -> tuple[int, ...]:
        others = [worker for worker in self.holders[cell] if worker != heavy]
        clashes = self._clashes(light, others) - self._clashes(heavy, others)
        owns = self.holders[cell][0] == heavy  # owners are even already, in every section
        return (clashes, owns, *self._cost(light, cell, others)[:2], -self.sizes[cell], cell)

    def _cost(self, worker: str, cell: int, others: Sequence[str]) -> tuple[int, ...]:
        """Rank targets that are all right: few new pairs, next to what it holds, little held, order."""
        beside = {cell - 1, cell + 1} & self.cells[worker]
        return (self._opens_pairs(worker, others), -len(beside), self.load[worker], self.places[worker])

    def _clashes(self, worker: str, others: Sequence[str]) -> int:
        """Say whether the worker would share its node with another holder."""
        return int(self.nodes[worker] in [self.nodes[other] for other in others])

    def _opens_pairs(self, worker: str, others: Sequence[str]) -> int:
        """Count the others with which it shares nothing yet although one of the two has partners enough."""
        mine = self.shared[worker]
        return sum(other not in mine and max(len(mine), len(self.shared[other])) >= MAX_PARTNERS for other in others)
