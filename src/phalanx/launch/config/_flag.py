"""Describes a flag of ``phalanx run``, and ties one to the field of ``LaunchConfig`` that it sets.

Imports nothing heavy: the command line reads these before anything else is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


class UsageError(ValueError):
    """The command line makes no sense; the message is one line for a person."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Describes one flag. ``kind`` None: it takes no value and is false by default."""

    name: str
    kind: Callable[[str], Any] | None = str
    default: Any = None
    short: str = ""
    choices: tuple[str, ...] | None = None
    help: str = ""

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"


def flag(**facts: Any) -> dict[str, Any]:
    """Tie a flag of the same name to a dataclass field, as its metadata; a ``default`` here is the flag's own."""
    return {"flag": facts}


def flags_of(config: type) -> tuple[Flag, ...]:
    """List the flags of a dataclass, in the order of its fields."""
    return tuple(
        Flag(**{"name": each.name.replace("_", "-"), "default": each.default, **each.metadata["flag"]})
        for each in fields(config)
        if "flag" in each.metadata
    )


def duration(text: str) -> float:
    """Read seconds, or minutes, hours or days with their letter. ``ValueError`` for what is none.

    >>> duration("90"), duration("90s"), duration("1.5h"), duration("2d")
    (90.0, 90.0, 5400.0, 172800.0)
    """
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:])
    return float(text) if unit is None else float(text[:-1]) * unit


def words(text: str) -> list[str]:
    """Split at commas; a doubled comma stands for one.

    >>> words("a,b,,c")
    ['a', 'b,c']
    """
    parts = text.replace(",,", "\0").split(",")
    return [part.replace("\0", ",") for part in parts if part]
