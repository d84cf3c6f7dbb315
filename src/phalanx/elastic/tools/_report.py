"""Makes one HTML page about a job: loss by round, the lives of its workers, throughput, and every regroup in a table.

Self-contained: inline SVG and CSS, no script, nothing is fetched. Whatever came from a file is escaped where it is
put into the page (``_text``, ``_table``, ``_line``), so that no text of an event becomes a tag.
``python -m phalanx.elastic.tools._report LOG_DIR OUT.html`` makes one for any job that has a log directory.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.elastic.tools._history import History, read_history

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 240, 60, 28
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#be185d")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2937}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem;border-bottom:1px solid #e5e7eb;text-align:left;font-variant-numeric:tabular-nums}
code{word-break:break-all}.same{color:#047857;font-weight:600}.differ{color:#b91c1c;font-weight:600}
svg{width:100%;height:auto}text{font:11px system-ui,sans-serif;fill:#6b7280}.grid{stroke:#e5e7eb}
"""

Point = tuple[float, float]


class Axes:
    """Maps values to places on a plot and draws the frame."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], height: int = HEIGHT) -> None:
        self.height = height
        self.x0, self.x1 = _span(xs)
        self.y0, self.y1 = _span(ys)

    def place(self, x: float, y: float) -> Point:
        across = LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - 10)
        up = (y - self.y0) / (self.y1 - self.y0) * (self.height - BOTTOM - 10)
        return round(across, 1), round(self.height - BOTTOM - up, 1)

    def frame(self, unit: str, label_y: bool = True) -> str:
        parts = []
        for i in range(5):
            x = self.x0 + (self.x1 - self.x0) * i / 4
            px, py = self.place(x, self.y0)
            anchor = "end" if i == 4 else "middle"
            label = f"{x:.1f} {unit}" if unit else f"{x:.0f}"
            parts.append(_text(px, py + 18, label, anchor))
            if label_y:
                y = self.y0 + (self.y1 - self.y0) * i / 4
                px, py = self.place(self.x0, y)
                parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{py}" y2="{py}"/>')
                parts.append(_text(LEFT - 6, py + 4, f"{y:.3g}", "end"))
        return "".join(parts)


def render(history: History, *, title: str, facts: Sequence[tuple[str, str]] = (), digests: Sequence[str] = ()) -> str:
    """Return the page. ``facts`` are shown on top; ``digests`` should all be the same, and the page says whether they
    are."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    if digests:
        same = len(set(digests)) == 1
        verdict = "the same bits" if same else "DIFFERENT BITS"
        body.append(f'<p class="{"same" if same else "differ"}">{verdict}</p>')
        body += [f"<p><code>{html.escape(digest)}</code></p>" for digest in digests]
    body.append(_table(["", ""], facts))
    sections = (
        ("Loss", _loss(history)),
        ("Workers", _lives(history)),
        ("Samples per second", _throughput(history)),
    )
    body += [f"<h2>{name}</h2>{svg}" for name, svg in sections]
    body.append("<h2>Generations</h2>" + _rounds(history))
    if history.num_torn:
        body.append(f"<p>{history.num_torn} lines of the event files were torn and are left out.</p>")
    content = "\n".join(body)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{content}</body></html>\n"
    )


def _loss(history: History) -> str:
    marks = [mark for mark in history.steps if mark.loss is not None]
    if not marks:
        return "<p>No step was committed.</p>"
    axes = Axes([mark.step for mark in marks], [mark.loss or 0.0 for mark in marks])
    parts = [axes.frame("")]
    rounds = sorted({mark.round for mark in marks})
    for i, key in enumerate(rounds):
        points = [axes.place(mark.step, mark.loss or 0.0) for mark in marks if mark.round == key]
        parts.append(_line(points, COLOURS[i % len(COLOURS)], f"generation {key[0]}.{key[1]}"))
    return _svg(parts, HEIGHT)


def _lives(history: History) -> str:
    height = 26 * len(history.lives) + BOTTOM + 16
    ends = [life.seen - history.began for life in history.lives]
    axes = Axes([0.0, *ends], [0.0, float(len(history.lives))], height)
    parts = [axes.frame("s", label_y=False)]
    colours = {"finished": "#059669", "left": "#d97706", "died": "#dc2626"}
    for i, life in enumerate(history.lives):
        (x0, y), (x1, _) = (
            axes.place(time - history.began, len(history.lives) - i - 0.5) for time in (life.born, life.seen)
        )
        colour = colours.get(life.end, colours["died"])
        name = life.worker.rpartition(".")[2] or life.worker
        parts.append(f'<line x1="{x0}" x2="{x1}" y1="{y}" y2="{y}" stroke="#94a3b8" stroke-width="8"/>')
        title = f"<title>{html.escape(life.end)}</title>"
        parts.append(f'<circle cx="{x1}" cy="{y}" r="6" fill="{colour}">{title}</circle>')
        parts.append(_text(LEFT - 6, y + 4, name, "end"))
        parts.append(_text(max(x0 + 4, x1 - 52), y - 7, life.end, "start"))
    for mark in history.rounds:
        x, _ = axes.place(mark.time - history.began, 0)
        parts.append(f'<line x1="{x}" x2="{x}" y1="4" y2="{height - BOTTOM}" stroke="#2563eb" stroke-dasharray="2 3"/>')
    return _svg(parts, height)


def _throughput(history: History) -> str:
    points = [(time - history.began, rate) for time, rate in history.throughput()]
    if not points:
        return "<p>Too few steps.</p>"
    axes = Axes([x for x, _ in points], [0.0, *(y for _, y in points)])
    return _svg([axes.frame("s"), _line([axes.place(x, y) for x, y in points], COLOURS[0], "samples/s")], HEIGHT)


def _rounds(history: History) -> str:
    rows = [
        (
            f"{mark.round[0]}.{mark.round[1]}",
            f"{mark.time - history.began:.2f} s",
            str(mark.step),
            str(len(mark.workers)),
            " ".join(f"+{worker.rpartition('.')[2]}" for worker in mark.joined)
            + " "
            + " ".join(f"\N{MINUS SIGN}{worker.rpartition('.')[2]}" for worker in mark.left),
            f"{mark.seconds * 1000:.0f} ms",
        )
        for mark in history.rounds
    ]
    return _table(["generation", "at", "at step", "workers", "change", "regroup took"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _line(points: Sequence[Point], colour: str, title: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="1.6" fill="{colour}"/>' for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    return f'<polyline points="{path}" {style}><title>{html.escape(title)}</title></polyline>{dots}'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high)) else (low, low + max(1.0, abs(low)))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 2:
        print("usage: python -m phalanx.elastic.tools._report LOG_DIR OUT.html", file=sys.stderr)
        return 2
    page = render(read_history(Path(arguments[0])), title="An elastic job")
    out = Path(arguments[1])
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        print(f"the report cannot be written to {out}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
