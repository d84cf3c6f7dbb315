"""Draws the pictures of the concept pages: slots, the tree, a commit, generations and cells, as SVG files.

Each stands on a white ground of its own, so that it can be read on a dark page. Sizes are in pixels.

python -m tools.pictures
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
COLOURS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fbb4b9")
DEAD = "#eeeeee"


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12, colour: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#555"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4, words) if words else "")


def line(x: float, y: float, to_x: float, to_y: float, *, colour: str = "#555", arrow: bool = False) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="1.5"{end}/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" role="img"><title>{title}</title>{arrow}'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def ranges(slots: int, workers: int) -> list[range]:
    """Contiguous ranges of slots, as a job cuts them.

    >>> ranges(8, 3)
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    starts = [slots * worker // workers for worker in range(workers + 1)]
    return [range(first, last) for first, last in itertools.pairwise(starts)]


def slots() -> str:
    """The same eight slots on four, three and five workers."""
    parts = [text(10, 24, "8 slots, fixed", anchor="start")]
    parts += [box(150 + 60 * slot, 8, 56, 24, DEAD, f"slot {slot}") for slot in range(8)]
    cases = ((4, "4 workers"), (3, "one dies: 3 workers"), (5, "two join: 5 workers"))
    for row, (workers, title) in enumerate(cases):
        y = 60 + 52 * row
        parts.append(text(10, y + 20, title, anchor="start"))
        for worker, carried in enumerate(ranges(8, workers)):
            x, width = 150 + 60 * carried.start, 60 * len(carried) - 4
            parts.append(box(x, y, width, 32, COLOURS[worker], f"worker {worker}"))
    return picture(640, 220, "Eight slots carried by four, three and five workers", parts)


def tree() -> str:
    """A binary tree over eight slots, with the subtrees that three workers add up by themselves."""
    owner = {slot: worker for worker, carried in enumerate(ranges(8, 3)) for slot in carried}
    left = {
        (level, node): 40 + 70 * (node * 2**level + (2**level - 1) / 2)
        for level in range(4)
        for node in range(8 >> level)
    }
    lines, boxes = [], []
    for (level, node), x in left.items():
        y = 20 + 50 * level
        below = {owner[slot] for slot in range(node << level, (node + 1) << level)}
        fill = COLOURS[below.pop()] if len(below) == 1 else "#fff"
        boxes.append(box(x, y, 44, 26, fill, f"slot {node}" if level == 0 else "+"))
        if level < 3:
            lines.append(line(x + 22, y + 26, left[level + 1, node // 2] + 22, y + 50))
    parts = [*lines, *boxes]
    parts += [box(40 + 190 * worker, 225, 16, 16, COLOURS[worker]) for worker in range(3)]
    parts += [text(62 + 190 * worker, 238, f"added up by worker {worker}", anchor="start") for worker in range(3)]
    parts += [box(40, 250, 16, 16, "#fff"), text(62, 263, "completed by the owner of the chunk", anchor="start")]
    return picture(620, 278, "One binary tree over eight slots on three workers", parts)


def commit() -> str:
    """A step in three phases, and what a death in each means."""
    phases = (("compute slots", COLOURS[0]), ("reduce: 2 collectives", COLOURS[1]), ("commit", COLOURS[2]))
    parts = []
    for index, (title, colour) in enumerate(phases):
        parts.append(box(20 + 200 * index, 20, 180, 40, colour, title))
        if index:
            parts.append(line(200 * index, 40, 18 + 200 * index, 40, arrow=True))
    parts.append(line(600, 40, 640, 40, arrow=True))
    parts.append(text(644, 44, "next step", anchor="start"))
    cases = (
        (110, "a worker dies", "nobody applied it: DROPPED,", "the same step again, same bits"),
        (310, "a worker dies", "if some have the sum, they apply it,", "others take their state: ADOPTED"),
        (510, "a worker dies", "applied: survivors go on,", "the replacement gets the state"),
    )
    for x, event, first, second in cases:
        parts += [line(x, 60, x, 96, colour="#b00", arrow=True), text(x + 6, 80, event, anchor="start", colour="#b00")]
        parts += [text(x, 114, first, size=11), text(x, 130, second, size=11)]
    return picture(720, 145, "A step: compute, reduce, commit, and what a death in each phase means", parts)


def generations() -> str:
    """Lifelines of four workers over two generations."""
    bands: Sequence[tuple[int, int, str]] = (
        (100, 270, "generation 1"),
        (290, 420, "generation 2, round 1"),
        (440, 640, "generation 2, round 2"),
    )
    parts = [box(left, 8, right - left, 172, "#f6f6f6") for left, right, _ in bands]
    parts += [text((left + right) / 2, 24, title) for left, right, title in bands]
    lives = ((100, 640, COLOURS[0]), (100, 278, COLOURS[1]), (100, 640, COLOURS[2]), (350, 640, COLOURS[3]))
    for row, (left, right, colour) in enumerate(lives):
        y = 40 + 34 * row
        parts.append(text(10, y + 14, f"worker {row}", anchor="start"))
        parts.append(box(left, y, right - left, 20, colour))
    parts.append(text(296, 89, "kill -9", anchor="start", size=11, colour="#b00"))
    parts.append(text(356, 156, "starts", anchor="start", size=11))
    parts.append(text(446, 156, "joins at a step boundary", anchor="start", size=11))
    parts += [text(280, 196, "regroup: survivors keep", size=11), text(280, 210, "process and memory", size=11)]
    return picture(660, 218, "Two generations: a worker dies, a replacement joins", parts)


def cells() -> str:
    """A flat vector cut by rows for four ranks, and into cells that are held twice."""
    parts = [text(10, 27, "a unit: one flat vector", anchor="start")]
    parts += [box(190, 10, 280, 26, DEAD, "up.weight"), box(470, 10, 200, 26, DEAD, "down.weight")]
    parts.append(text(10, 67, "rows, 4 ranks", anchor="start"))
    for left, width in ((190, 280), (470, 200)):
        parts += [box(left + width / 4 * rank, 50, width / 4, 26, COLOURS[rank], str(rank)) for rank in range(4)]
    for row, (title, holders) in enumerate((("cells, 4 workers", 4), ("the same, worker 3 lost", 3))):
        y = 100 + 76 * row
        parts.append(text(10, y + 17, title, anchor="start"))
        for cell in range(8):
            first, mirror = cell * 4 // 8, (cell * 4 // 8 + 1) % 4
            held = [first, mirror] if holders == 4 else [worker for worker in (first, mirror) if worker < 3]
            for copy, worker in enumerate(held):
                parts.append(box(190 + 60 * cell, y + 28 * copy, 60, 26, COLOURS[worker], str(worker)))
    parts.append(text(190, 262, "cells stay where they are; only their holders change", anchor="start", size=11))
    return picture(690, 272, "A unit cut by rows, and into cells that are held twice", parts)


PICTURES = {"slots": slots, "tree": tree, "commit": commit, "generations": generations, "cells": cells}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
