"""Pictures of a layout: SVG text and PNG bytes, without any drawing library.

Owns ``sharding_svg`` and ``sharding_png``. Both show the same rectangles in the same colours, one colour for each set
of ranks; the PNG writes rank numbers in a small font of its own.
"""

from __future__ import annotations

import struct
import zlib
from html import escape

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.debug._tiles import Tile, layout_of, tiles
from phalanx.tensor.layout._spec import Spec

_COLOURS = ("#9ecae9", "#ffbf79", "#88d27a", "#f2a6c1", "#f2cf5b", "#b79fd6", "#83bcb6", "#d8b5a5")
_INK = (34, 34, 34)
# Three pixels wide, five high, row by row: the binary digits of each number.
_FONT = {
    "0": (7, 5, 5, 5, 7), "1": (2, 6, 2, 2, 7), "2": (7, 1, 7, 4, 7), "3": (7, 1, 7, 1, 7), "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7), "6": (7, 4, 7, 5, 7), "7": (7, 1, 1, 1, 1), "8": (7, 5, 7, 5, 7), "9": (7, 5, 7, 1, 7),
    ",": (0, 0, 0, 2, 4), " ": (0, 0, 0, 0, 0),
}  # fmt: skip


def sharding_svg(dtensor: DTensor, width: int = 480) -> str:
    """Say which rank holds what, as SVG text, in proportion to the sizes.

    >>> Path("layout.svg").write_text(sharding_svg(x))   # doctest: +SKIP
    """
    spec = layout_of(dtensor)
    found = tiles(spec)
    height, caption = _height(spec, width), 22
    shapes = []
    for tile in found:
        x, y, w, h = _box(tile, spec, width, height)
        shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="{_colour(tile, found)}" stroke="#444"/>'
            f'<text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}" text-anchor="middle" dominant-baseline="middle" '
            f'font-size="13">{escape(_shortened(tile, w))}</text>'
        )
    text = escape(_caption(spec))
    shapes.append(f'<text x="2" y="{height + 16}" font-size="12">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + caption}" width="{width}" '
        f'height="{height + caption}" font-family="sans-serif"><title>{text}</title>'
        f'<rect width="{width}" height="{height + caption}" fill="white"/>{"".join(shapes)}</svg>'
    )


def sharding_png(dtensor: DTensor, width: int = 480) -> bytes:
    """Draw the picture of ``sharding_svg`` as PNG bytes (without the caption).

    >>> Path("layout.png").write_bytes(sharding_png(x))   # doctest: +SKIP
    """
    spec = layout_of(dtensor)
    found = tiles(spec)
    height = _height(spec, width)
    pixels = bytearray(b"\xff" * (3 * width * height))

    def paint(x0: int, y0: int, x1: int, y1: int, colour: tuple[int, ...]) -> None:
        for y in range(max(0, y0), min(height, y1)):
            start, end = 3 * (y * width + max(0, x0)), 3 * (y * width + min(width, x1))
            pixels[start:end] = bytes(colour) * ((end - start) // 3)

    for tile in found:
        x, y, w, h = (round(v) for v in _box(tile, spec, width, height))
        paint(x, y, x + w, y + h, _INK)
        paint(x + 1, y + 1, x + w - 1, y + h - 1, _rgb(_colour(tile, found)))
        label = _shortened(tile, w).replace("…", ",")
        left, top, size = x + (w - 8 * len(label)) // 2, y + h // 2 - 5, 2
        for position, letter in enumerate(label):
            for row, bits in enumerate(_FONT[letter]):
                for column in range(3):
                    if bits >> (2 - column) & 1:
                        at_x, at_y = left + 8 * position + column * size, top + row * size
                        paint(at_x, at_y, at_x + size, at_y + size, _INK)
    rows = (b"\0" + pixels[3 * width * y : 3 * width * (y + 1)] for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _caption(spec: Spec) -> str:
    partial = " (each rank holds a contribution)" if any(p.is_partial() for p in spec.placements) else ""
    empty = "" if spec.num_elements else ": no elements"
    return f"{spec!r} on {'x'.join(map(str, spec.mesh.shape))} ranks{partial}{empty}"


def _height(spec: Spec, width: int) -> int:
    rows = spec.shape[0] if len(spec.shape) == 2 else 1
    return max(48, min(width, round(width * rows / max(1, spec.shape[-1]))))


def _box(tile: Tile, spec: Spec, width: int, height: int) -> tuple[float, float, float, float]:
    """x, y, width, height of a tile in the picture."""
    across = width / spec.shape[-1]
    down = height / (spec.shape[0] if len(spec.shape) == 2 else 1)
    (top, bottom), (left, right) = tile.rows, tile.columns
    return left * across, top * down, (right - left) * across, (bottom - top) * down


def _colour(tile: Tile, found: list[Tile]) -> str:
    holders = sorted({other.ranks for other in found})
    return _COLOURS[holders.index(tile.ranks) % len(_COLOURS)]


def _shortened(tile: Tile, width: float) -> str:
    label = tile.label
    fits = max(1, int(width // 8))
    return label if len(label) <= fits else label[: max(1, fits - 1)] + "…"


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
