"""Tells what the workers of a sharded job hold: in words at the start, as events, and which parameters a cell is of."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from phalanx.elastic.sharded._holdings import describe
from phalanx.events._event_types import CellsHeld

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding


def tell_protection(sharding: JobSharding) -> None:
    """Say what each worker holds, and what a loss would cost."""
    held = sharding.holdings
    assert held is not None, "it has settled"
    is_first = sharding.live_group.rank == 0 and (sharding.tensor_groups is None or sharding.tensor_groups.lane == 0)
    if is_first and sharding.job.run.progress:
        told = describe(sharding.table, held, sharding.workers, sharding.copies, sharding.nodes)
        print(f"phalanx: {told}", file=sys.stderr, flush=True)


def tell_holdings(sharding: JobSharding) -> None:
    """Write down what this worker holds, and who mirrors it."""
    assert sharding.holdings is not None, "it has settled"
    held = sharding.holdings.held_by(sharding.me)
    others = {worker for cell in held for worker in sharding.holdings.holders[cell] if worker != sharding.me}
    alone = [cell for cell in held if len(sharding.holdings.holders[cell]) == 1]
    sharding.job.events.write(
        CellsHeld(
            step=sharding.job.step,
            cells=len(held),
            owned=len(sharding.holdings.owned_by(sharding.me)),
            unprotected=len(alone),
            mirrors=tuple(sorted(others)),
            copies=len(sharding.workers) if sharding.copies == "all" else sharding.copies,
            bytes=sum(sharding.table.sizes[cell] for cell in held),
            unprotected_bytes=sum(sharding.table.sizes[cell] for cell in alone),
        )
    )


def describe_cell(sharding: JobSharding, index: int) -> str:
    """Say which parameters a cell has a part of."""
    cell = sharding.table.cells[index]
    names = [
        p.name
        for p in sharding.units.parameters
        if p.key[:2] == (cell.unit, cell.section) and p.extent[0] < cell.end and cell.begin < p.extent[1]
    ]
    return f"cell {index} ({', '.join(names)})"
