"""Pictures of a layout: which rank holds which part of a tensor of one or two dims.

Owns ``visualize_sharding`` (terminal) and ``sharding_svg``. Nothing is communicated: a layout is known to every rank.
"""

from __future__ import annotations

import itertools
from html import escape
from typing import Any

from phalanx.tensor._dtensor import DTensor
from phalanx.tensor._spec import Spec

_COLOURS = ("#cfe8ff", "#ffe3cf", "#d9f2d9", "#f4d9f2", "#fff5c2", "#e0e0e0", "#d6f5f5", "#fbd3d3")

Tile = tuple[tuple[int, int], tuple[int, int], str]


def tiles(spec: Spec) -> list[Tile]:
    """(rows, columns, ranks) of each part; ranges are half-open. A 1-d tensor is one row."""
    if len(spec.shape) not in (1, 2):
        raise ValueError(f"only tensors of one or two dims can be drawn, this has shape {tuple(spec.shape)}")
    held: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    grid = spec.mesh.mesh
    for coordinate in itertools.product(*(range(n) for n in spec.mesh.shape)):
        ranges = []
        for dim, n in enumerate(spec.shape):
            cuts = spec.cuts(dim, coordinate)
            ranges.append(_range(n, cuts))
        area = ((0, 1), ranges[0]) if len(ranges) == 1 else (ranges[0], ranges[1])
        held.setdefault(area, []).append(int(grid[coordinate]))
    marks = " (partial)" if any(p.is_partial() for p in spec.placements) else ""
    return [
        (rows, columns, "rank " + ",".join(map(str, ranks)) + marks)
        for (rows, columns), ranks in sorted(held.items())
        if rows[0] < rows[1] and columns[0] < columns[1]
    ]


def _range(length: int, cuts: Any) -> tuple[int, int]:
    from phalanx.tensor._placement import indices_of

    held = indices_of(length, cuts)
    if held and held != list(range(held[0], held[-1] + 1)):
        raise ValueError("a strided layout holds several ranges and cannot be drawn")
    return (held[0], held[-1] + 1) if held else (0, 0)


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = True) -> None:
    """Print a table of which rank holds what, on rank zero of the mesh.

    >>> visualize_sharding(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))   # doctest: +SKIP
    """
    spec = dtensor._spec
    found = tiles(spec)
    if spec.mesh.get_coordinate() is None or any(spec.coordinate):
        return
    if header:
        print(header)
    rows = sorted({rows for rows, _, _ in found})
    columns = sorted({columns for _, columns, _ in found})
    cells = {(r, c): label for r, c, label in found}
    text = [[cells.get((r, c), "") for c in columns] for r in rows]
    names = [f"{a}-{b - 1}" for a, b in columns]
    sides = [f"{a}-{b - 1}" for a, b in rows]
    if use_rich:
        from rich.console import Console
        from rich.table import Table

        table = Table("", *names, show_lines=True)
        for side, line in zip(sides, text, strict=True):
            table.add_row(side, *line)
        Console().print(table)
        return
    print(plain_table(names, sides, text))


def plain_table(names: list[str], sides: list[str], text: list[list[str]]) -> str:
    """The same without colours or lines."""
    grid = [["", *names], *([side, *line] for side, line in zip(sides, text, strict=True))]
    widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid
    )


def sharding_svg(dtensor: DTensor, width: int = 480) -> str:
    """The picture as SVG text, in proportion to the sizes of the parts."""
    spec = dtensor._spec
    found = tiles(spec)
    total_rows = 1 if len(spec.shape) == 1 else spec.shape[0]
    total_columns = spec.shape[-1]
    height = max(60, min(width, int(width * total_rows / max(1, total_columns))))
    shapes = []
    for number, (rows, columns, label) in enumerate(found):
        x, y = columns[0] / total_columns * width, rows[0] / total_rows * height
        w, h = (columns[1] - columns[0]) / total_columns * width, (rows[1] - rows[0]) / total_rows * height
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{_COLOURS[number % len(_COLOURS)]}" '
            f'stroke="#444"/><text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}" text-anchor="middle" '
            f'dominant-baseline="middle" font-family="sans-serif" font-size="12">{escape(label)}</text>'
        )
    title = f"<title>{escape(repr(spec))}</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{title}{"".join(shapes)}</svg>'
