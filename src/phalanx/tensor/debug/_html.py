"""The page of CommDebugMode: one fold per module, no scripts, nothing loaded from elsewhere.

Owns ``render_html``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = (
    "body{font:14px/1.4 system-ui;margin:2em;max-width:70em}details{margin:.2em 0 .2em 1em}"
    "table{border-collapse:collapse;margin:.3em 1em}td{padding:.1em .8em;border-bottom:1px solid #ddd}"
    "summary{cursor:pointer}.b{color:#666}"
)


def render_html(records: Sequence[Any]) -> str:
    """A page with nested folds: ``a.b`` is inside ``a``."""
    tree: dict[str, Any] = {"children": {}, "records": []}
    for record in records:
        node = tree
        for part in filter(None, record.module.split(".")):
            node = node["children"].setdefault(part, {"children": {}, "records": []})
        node["records"].append(record)
    body = _fold("all collectives", tree, open_=True)
    return f"<!doctype html><meta charset=utf-8><title>Communication</title><style>{_STYLE}</style>{body}"


def _total(node: dict[str, Any]) -> tuple[int, int]:
    count, size = len(node["records"]), sum(r.nbytes for r in node["records"])
    for child in node["children"].values():
        more, bytes_ = _total(child)
        count, size = count + more, size + bytes_
    return count, size


def _fold(name: str, node: dict[str, Any], open_: bool = False) -> str:
    count, size = _total(node)
    rows = "".join(
        f"<tr><td>{escape(r.name)}</td><td>{escape(r.op)}</td><td>{r.nbytes} B</td>"
        f"<td>{'backward' if r.backward else 'forward'}</td><td class=b>{escape(r.line)}</td></tr>"
        for r in node["records"]
    )
    inner = "".join(_fold(child, part) for child, part in node["children"].items())
    table = f"<table>{rows}</table>" if rows else ""
    mark = " open" if open_ else ""
    summary = f"{escape(name)} <span class=b>{count} collectives, {size} B</span>"
    return f"<details{mark}><summary>{summary}</summary>{table}{inner}</details>"
