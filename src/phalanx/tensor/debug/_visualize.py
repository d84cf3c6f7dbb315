"""A layout in the terminal: who holds which rows and columns.

Owns ``visualize_sharding``. Nothing is communicated: a layout is known to every rank.
"""

from __future__ import annotations

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.debug._tiles import Range, layout_of, tiles
from phalanx.tensor.debug._trace import in_columns
from phalanx.tensor.layout._spec import Spec


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which shard of a tensor of one or two dims, on the first rank of its mesh.

    >>> visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))   # doctest: +SKIP
           columns 0-3
    rows 0-1  rank 0
    rows 2-3  rank 1

    ``use_rich`` draws a coloured table. See ``sharding_svg`` and ``sharding_png`` for pictures.
    """
    spec = layout_of(dtensor)
    names, sides, cells = _grid(spec)
    if spec.is_outside or any(spec.coordinate):
        return
    if header:
        print(header)
    if not spec.num_elements:
        print(f"{spec!r}: no elements, so no rank holds any")
    elif use_rich:
        _print_rich(spec, names, sides, cells)
    else:
        print(in_columns([["", *names], *([side, *line] for side, line in zip(sides, cells, strict=True))]))


def _grid(spec: Spec) -> tuple[list[str], list[str], list[list[str]]]:
    """Headings of columns and rows, and who holds each cell."""
    found = tiles(spec)
    rows, columns = sorted({t.rows for t in found}), sorted({t.columns for t in found})
    holders = {(t.rows, t.columns): t for t in found}
    partial = " (partial)" if any(p.is_partial() for p in spec.placements) else ""

    def cell(row: Range, column: Range) -> str:
        tile = holders.get((row, column))
        return "" if tile is None else f"rank{'s' * (len(tile.ranks) > 1)} {tile.label}{partial}"

    names = [f"columns {a}-{b - 1}" for a, b in columns]
    sides = [f"rows {a}-{b - 1}" if len(spec.shape) == 2 else "" for a, b in rows]
    return names, sides, [[cell(row, column) for column in columns] for row in rows]


def _print_rich(spec: Spec, names: list[str], sides: list[str], cells: list[list[str]]) -> None:
    # start-up: rich is of use to whoever prints only
    from rich.console import Console
    from rich.table import Table

    table = Table("", *names, show_lines=True, title=repr(spec).replace("[", r"\["))
    texts = sorted({text for line in cells for text in line})
    colours = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "bright_cyan")
    for side, line in zip(sides, cells, strict=True):
        table.add_row(side, *(f"[{colours[texts.index(text) % len(colours)]}]{text}[/]" for text in line))
    Console().print(table)
