"""Decides who holds which cells at the start, and who owns them among their holders.

Pure functions of the table and the workers in their order. In order of weight: every cell has its copies; workers hold
even bytes (at most one cell apart: memory is what a worker has least of); copies of a cell lie on different nodes as
far as even bytes allow; a worker shares cells with few others (``NUM_PARTNERS`` that mirror it, as many that it
mirrors), because each pair that shares a cell is one whose loss at once may be fatal; what a worker owns is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from phalanx.elastic.sharded._cell_table import CellTable
from phalanx.elastic.sharded._holdings import Copies, Holdings, node_of, num_copies
from phalanx.elastic.sharded._transfer_plan import TransferPlan

NUM_PARTNERS = 4
"""Workers over which the mirrors of one worker's cells are spread at the start: they re-protect it in parallel."""


def assign(table: CellTable, workers: Sequence[str], copies: Copies, nodes: Mapping[str, str]) -> Holdings:
    """Say who holds what at the start of a job.

    Each worker owns consecutive cells of every section; their mirrors are the next workers of a ring in which
    neighbours are on different nodes.
    """
    wanted = num_copies(copies, len(workers))
    ring = _ring(workers, nodes)
    holders: list[tuple[str, ...]] = []
    for turn, section in enumerate(table.of_section.values()):
        holders += _deal(table.sizes[section.start : section.stop], ring, turn, wanted, nodes)
    guess = Holdings(tuple(holders))
    plan = TransferPlan(table, guess, workers, wanted, nodes)
    plan.balance()
    return with_even_owners(table, guess.after(plan.moves), workers)


def trimmed(table: CellTable, holdings: Holdings, workers: Sequence[str], copies: Copies) -> Holdings:
    """Drop copies beyond ``copies``, from the mirrors that hold most: what a slice that was cut short has left over.

    >>> from phalanx.elastic.sharded._cell_table import SectionShape, cell_table
    >>> table = cell_table([[SectionShape((3072,))]], whole_matrices=False)
    >>> trimmed(table, Holdings((("a", "b", "c"), ("c", "b"), ("b", "a"))), ["a", "b", "c"], 2).holders
    (('a', 'c'), ('c', 'b'), ('b', 'a'))
    """
    wanted = num_copies(copies, len(workers))
    load = holdings.bytes_held(table, workers)
    places = {worker: place for place, worker in enumerate(workers)}
    holders = []
    for cell, each in enumerate(holdings.holders):
        kept = list(each)
        while len(kept) > wanted:
            most = max(kept[1:], key=lambda worker: (load[worker], places[worker]))
            kept.remove(most)
            load[most] -= table.sizes[cell]
        holders.append(tuple(kept))
    return Holdings(tuple(holders))


def with_even_owners(table: CellTable, holdings: Holdings, workers: Sequence[str]) -> Holdings:
    """Choose owners among the holders so that the bytes owned of each section are even. Nothing moves.

    A worker that owns too much of a section passes a cell on to a mirror of it, which may pass on one of its own, until
    one is reached that owns less.
    """
    places = {worker: place for place, worker in enumerate(workers)}
    total = dict.fromkeys(workers, 0)
    holders = list(holdings.holders)
    for section in table.of_section.values():
        owned = dict.fromkeys(workers, 0)
        for cell in section:
            owned[holders[cell][0]] += table.sizes[cell]
        largest = max(table.sizes[cell] for cell in section)
        for _ in section:
            most = max(workers, key=lambda worker: (owned[worker], total[worker], -places[worker]))
            path = _path_to_less(holders, section, most, owned, owned[most] - largest)
            if path is None:
                break
            for cell, new in path:
                owned[holders[cell][0]] -= table.sizes[cell]
                owned[new] += table.sizes[cell]
                holders[cell] = (new, *(worker for worker in holders[cell] if worker != new))
        for worker in workers:
            total[worker] += owned[worker]
    return Holdings(tuple(holders))


def _path_to_less(
    holders: Sequence[tuple[str, ...]], section: range, start: str, owned: Mapping[str, int], limit: int
) -> list[tuple[int, str]] | None:
    """Return which cells go to whom so that ``start`` owns less and one that owns less than ``limit`` owns more."""
    reached: dict[str, tuple[int, str] | None] = {start: None}
    queue = [start]
    for worker in queue:
        if owned[worker] < limit:
            path = []
            step = reached[worker]
            while step is not None:
                cell, giver = step
                path.append((cell, worker))
                worker, step = giver, reached[giver]
            return path
        for cell in section:
            if holders[cell][0] == worker:
                for other in holders[cell][1:]:
                    if other not in reached:
                        reached[other] = (cell, worker)
                        queue.append(other)
    return None


def _ring(workers: Sequence[str], nodes: Mapping[str, str]) -> list[str]:
    """Order workers so that neighbours are on different nodes as far as possible.

    >>> _ring(["a0", "a1", "b0", "b1", "a2"], {"a0": "a", "a1": "a", "a2": "a", "b0": "b", "b1": "b"})
    ['a0', 'b0', 'a1', 'b1', 'a2']
    """
    by_node: dict[str, list[str]] = {}
    for worker in workers:
        by_node.setdefault(node_of(nodes, worker), []).append(worker)
    placed = [
        ((number + 0.5) / len(members), order, worker)
        for order, members in enumerate(by_node.values())
        for number, worker in enumerate(members)
    ]
    return [worker for _, _, worker in sorted(placed)]


def _deal(
    sizes: Sequence[int], ring: Sequence[str], turn: int, wanted: int, nodes: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield the holders of the cells of one section."""
    before, total = 0, sum(sizes)
    last, number = -1, 0
    for size in sizes:
        chunk = (2 * before + size) * len(ring) // (2 * total)  # where the cell's middle lies
        before += size
        number = number + 1 if chunk == last else 0
        last = chunk
        place = (chunk + turn) % len(ring)
        yield (ring[place], *_mirrors(ring, place, number + turn, wanted - 1, nodes))


def _mirrors(ring: Sequence[str], place: int, turn: int, wanted: int, nodes: Mapping[str, str]) -> list[str]:
    """Return ``wanted`` of the partners of the worker at ``place``, others at each turn."""
    following = [ring[(place + distance) % len(ring)] for distance in range(1, len(ring))]
    here = node_of(nodes, ring[place])
    following.sort(key=lambda worker: node_of(nodes, worker) == here)
    partners = following[: max(NUM_PARTNERS, wanted)]
    turned = [partners[(turn + i) % len(partners)] for i in range(len(partners))]
    found: list[str] = []
    for _ in range(wanted):
        used = {here, *(node_of(nodes, worker) for worker in found)}
        found.append(next((w for w in turned if node_of(nodes, w) not in used), turned[0]))
        turned.remove(found[-1])
    return found
