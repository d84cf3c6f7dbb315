"""What communicated, and on whose behalf: counted by module, phase, operation and line.

Owns ``Place``, ``Record`` (the counts) and ``ModuleTree`` (the same counts, nested as the modules are). Pure
bookkeeping; who is running is ``_attribution.py``'s to say, how it is printed ``_report.py``'s and ``_page.py``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ROOT = "Global"
PHASES = ("forward", "backward")


class Place(NamedTuple):
    """Who communicated: the module, the phase, the torch function, and the user's line."""

    module: str
    phase: str
    op: str
    line: str


@dataclass
class Traffic:
    """How often, and how many bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, other: Traffic) -> None:
        self.count += other.count
        self.nbytes += other.nbytes

    def __str__(self) -> str:
        return f"{self.count} ({readable(self.nbytes)})"


@dataclass
class Record:
    """Everything a ``CommDebugMode`` has seen."""

    traffic: dict[tuple[Place, str], Traffic] = field(default_factory=dict)
    operations: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """(module, torch function, whether a DTensor was among its arguments) -> how often."""
    modules: dict[str, str] = field(default_factory=dict)
    """Name -> class name, in the order of their first call."""
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note(self, place: Place, collective: str, nbytes: int) -> None:
        self.traffic.setdefault((place, collective), Traffic()).add(Traffic(1, nbytes))

    def by_collective(self) -> dict[str, Traffic]:
        total: dict[str, Traffic] = {}
        for (_, collective), traffic in self.traffic.items():
            total.setdefault(collective, Traffic()).add(traffic)
        return total


@dataclass
class ModuleTree:
    """One module with its counts (those of its children included) and its children."""

    name: str
    kind: str
    total: dict[str, dict[str, Traffic]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    calls: list[tuple[Place, str, Traffic]] = field(default_factory=list)
    """What this module itself communicated, not its children."""
    operations: list[tuple[str, bool, int]] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    children: list[ModuleTree] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleTree]]:
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def build_tree(record: Record) -> ModuleTree:
    """Return the modules that ran, nested by their names, below one root for what ran outside of any."""
    root = ModuleTree(ROOT, "")
    known = {ROOT: root}
    for name, kind in record.modules.items():
        parent = known.get(_parent(name, known), root)
        known[name] = ModuleTree(name, kind)
        parent.children.append(known[name])
    for (place, collective), traffic in record.traffic.items():
        at = known.get(place.module, root)
        at.calls.append((place, collective, traffic))
        for node in {id(n): n for n in (*_ancestors(at.name, known), root)}.values():
            node.total[place.phase].setdefault(collective, Traffic()).add(traffic)
    for (module, op, distributed), count in record.operations.items():
        known.get(module, root).operations.append((op, distributed, count))
    for module, parameters in record.parameters.items():
        known[module].parameters = {name: describe(value) for name, value in parameters.items()}
    return root


def _parent(name: str, known: dict[str, ModuleTree]) -> str:
    """Return the longest known name above ``name``: containers that never ran are left out."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ROOT


def _ancestors(name: str, known: dict[str, ModuleTree]) -> Iterator[ModuleTree]:
    while name in known:
        yield known[name]
        if "." not in name:
            return
        name = _parent(name, known)


def describe(parameter: Any) -> str:
    """``float32[10, 6] [tp:S(0)]`` for a DTensor, the same without layout for a plain tensor."""
    spec = getattr(parameter, "_spec", None)
    if spec is not None:
        return repr(spec)
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"


def readable(nbytes: int) -> str:
    """
    >>> readable(96), readable(2_500_000)
    ('96 B', '2.5 MB')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"


def in_columns(rows: list[list[str]]) -> str:
    """Return rows of cells as text, columns padded to one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
