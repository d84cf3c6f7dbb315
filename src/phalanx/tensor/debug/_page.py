"""A module tree as one self-contained HTML page: no script, no network; modules fold.

Owns ``html_page``. Every name that comes from the user's program is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.tensor.debug._report import check_level, origin, shown_calls, shown_operations
from phalanx.tensor.debug._trace import ModuleTree, Traffic, readable

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
details { margin-left: 1.2em; border-left: 1px solid #8884; padding-left: .6em; }
body > details { margin-left: 0; border: 0; }
summary { cursor: pointer; padding: .1em 0; }
.kind { opacity: .6; } .none { opacity: .5; }
.forward, .backward { border-radius: .3em; padding: 0 .4em; margin-left: .5em; white-space: nowrap; }
.forward { background: #4a90d933; } .backward { background: #d9824a33; }
table { border-collapse: collapse; margin: .2em 0 .4em 1.2em; font-size: 12px; }
td, th { padding: 0 .8em 0 0; text-align: left; vertical-align: top; }
code { font-size: 12px; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1f; color: #ddd; } }
"""


def html_page(root: ModuleTree, noise_level: int) -> str:
    """Return the page as text."""
    check_level(noise_level)
    count = sum(t.count for total in root.total.values() for t in total.values())
    nbytes = sum(t.nbytes for total in root.total.values() for t in total.values())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Communication by module</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Communication by module</h1>\n"
        f"<p>{count} collectives, {readable(nbytes)} on this rank. A module's numbers include its children's.</p>\n"
        f"{_module(root, noise_level, 0)}</body></html>\n"
    )


def _module(node: ModuleTree, noise_level: int, depth: int) -> str:
    kind = f' <span class="kind">{escape(node.kind)}</span>' if node.kind else ""
    badges = "".join(
        f'<span class="{phase}">{phase}: {escape(_listed(total))}</span>'
        for phase, total in node.total.items()
        if total
    )
    silent = "" if badges else ' <span class="none">no communication</span>'
    opened = " open" if depth < 2 else ""
    inner = _details(node, noise_level) + "".join(_module(c, noise_level, depth + 1) for c in node.children)
    return f"<details{opened}><summary>{escape(node.name)}{kind}{badges}{silent}</summary>\n{inner}</details>\n"


def _listed(total: dict[str, Traffic]) -> str:
    return ", ".join(f"{name} {traffic}" for name, traffic in total.items())


def _details(node: ModuleTree, noise_level: int) -> str:
    rows = [
        (place.phase, collective, str(traffic), origin(place))
        for place, collective, traffic in shown_calls(node, noise_level)
    ]
    text = _table(("phase", "collective", "count", "from"), rows)
    if noise_level >= 1:
        text += _table(("parameter", "layout"), list(node.parameters.items()))
    operations = [
        (op, "DTensor" if distributed else "plain", str(count))
        for op, distributed, count in shown_operations(node, noise_level)
    ]
    return text + _table(("operation", "on", "count"), operations)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td><code>{escape(cell)}</code></td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><tr>{heads}</tr>\n{body}</table>\n"
