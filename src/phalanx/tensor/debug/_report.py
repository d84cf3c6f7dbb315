"""A module tree as text and as JSON, at a noise level.

Owns ``as_table``, ``as_json``, and what each noise level shows (``shown_calls``, ``shown_operations``).
"""

from __future__ import annotations

from typing import Any

from phalanx.tensor.debug._trace import ModuleTree, Place, Traffic

_INDENT = "  "


def check_level(noise_level: int) -> int:
    if noise_level not in (0, 1, 2, 3):
        raise ValueError(f"noise_level is 0, 1, 2 or 3, got {noise_level!r}")
    return noise_level


def shown_calls(node: ModuleTree, noise_level: int) -> list[tuple[Place, str, Traffic]]:
    return node.calls if noise_level >= 1 else []


def shown_operations(node: ModuleTree, noise_level: int) -> list[tuple[str, bool, int]]:
    return [one for one in node.operations if noise_level >= (2 if one[1] else 3)]


def origin(place: Place) -> str:
    """``linear at train.py:12`` with whatever is known of it."""
    return " at ".join(part for part in (place.op, place.line) if part and part != "?")


def as_table(root: ModuleTree, noise_level: int) -> str:
    """Indented text; the counts of a module include those of its children."""
    check_level(noise_level)
    lines = []
    for depth, node in root.walk():
        pad = _INDENT * depth
        lines.append(f"{pad}{node.name}" + (f" ({node.kind})" if node.kind else ""))
        inner = pad + _INDENT
        for phase, total in node.total.items():
            if total:
                lines.append(f"{inner}{phase}: " + ", ".join(f"{name} {t}" for name, t in total.items()))
        if noise_level >= 1:
            lines += [f"{inner}parameter {name}: {layout}" for name, layout in node.parameters.items()]
        for place, collective, traffic in shown_calls(node, noise_level):
            lines.append(f"{inner}* {place.phase} {collective} {traffic}: {origin(place)}")
        for op, distributed, count in shown_operations(node, noise_level):
            lines.append(f"{inner}- {op} x{count}" + (" on DTensors" if distributed else ""))
    return "\n".join(lines)


def as_json(node: ModuleTree, noise_level: int) -> dict[str, Any]:
    """Nested objects, one per module."""
    check_level(noise_level)
    result: dict[str, Any] = {"name": node.name, "class": node.kind}
    for phase, total in node.total.items():
        result[phase] = {name: {"count": t.count, "bytes": t.nbytes} for name, t in total.items()}
    if noise_level >= 1:
        result["parameters"] = node.parameters
        result["collectives"] = [
            {
                "phase": place.phase,
                "collective": collective,
                "count": traffic.count,
                "bytes": traffic.nbytes,
                "operation": place.op,
                "line": place.line,
            }
            for place, collective, traffic in shown_calls(node, noise_level)
        ]
    if noise_level >= 2:
        result["operations"] = [
            {"name": op, "on_dtensors": distributed, "count": count}
            for op, distributed, count in shown_operations(node, noise_level)
        ]
    result["children"] = [as_json(child, noise_level) for child in node.children]
    return result
