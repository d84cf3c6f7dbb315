"""Reads the files of JSON lines that workers write: their events and their audit logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.events._writer import parse_lines


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a last line cut short by a kill is left out, and so is what is no object."""
    return parse_lines(path.read_bytes())[0]
