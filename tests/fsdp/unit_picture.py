"""The picture of docs/fsdp.md, drawn from layouts. ``python tests/fsdp/unit_picture.py`` draws it; a test compares."""

from __future__ import annotations

from math import prod
from pathlib import Path

from phalanx.fsdp.layout._unit_layout import UnitLayout, cells, flat_starts, rows

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "unit.svg"
SHAPES = {"up.weight": (24, 16), "up.bias": (24,), "down.weight": (16, 24), "norm": (16,)}
NUM_RANKS = 4
COLORS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb")
WIDTH, HEIGHT, MARGIN, LABELS = 720, 26, 10, 150


def draw() -> str:
    """Three bars over the same flat vector: its parameters, the rows that ranks hold, and cells with two holders."""
    sizes = [prod(shape) for shape in SHAPES.values()]
    starts = flat_starts(sizes)
    length = starts[-1]
    by_rows = rows(list(SHAPES.values()), NUM_RANKS)
    holders = [[number % NUM_RANKS, (number + 1) % NUM_RANKS] for number in range(8)]
    by_cells = cells(length, holders)
    parts = [_bar(0, "one unit: its flat vector", [(s, s + n, "#eeeeee", name) for s, n, name in
                                                   zip(starts, sizes, SHAPES, strict=False)], length)]  # fmt: skip
    parts.append(_bar(1, "fully_shard: rows", _owned(by_rows), length))
    parts.append(_bar(2, "cells, first holder", _owned(by_cells), length))
    height = 3 * (HEIGHT + MARGIN) + MARGIN
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LABELS + 2 * MARGIN}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _owned(layout: UnitLayout) -> list[tuple[int, int, str, str]]:
    return [(a, b, COLORS[rank], str(rank)) for rank, ranges in enumerate(layout.owned) for a, b in ranges]


def _bar(line: int, title: str, pieces: list[tuple[int, int, str, str]], length: int) -> str:
    top = MARGIN + line * (HEIGHT + MARGIN)
    made = [f'<text x="{MARGIN}" y="{top + HEIGHT * 0.65:.1f}">{title}</text>']
    for begin, end, color, label in sorted(pieces):
        x, width = LABELS + MARGIN + WIDTH * begin / length, WIDTH * (end - begin) / length
        made.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" fill="{color}" stroke="#555555"/>'
        )
        if width > 7 * len(label):
            made.append(
                f'<text x="{x + width / 2:.1f}" y="{top + HEIGHT * 0.65:.1f}" text-anchor="middle">{label}</text>'
            )
    return "\n".join(made)


if __name__ == "__main__":
    PICTURE.write_text(draw())
