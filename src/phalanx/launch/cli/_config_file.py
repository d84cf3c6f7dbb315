"""Reads a job from a TOML file (``phalanx run --config job.toml``): any flag by its name, ``script`` and ``args``.

What the command line says wins over the file, and the file over ``PET_*`` variables. A name that is no flag, or a value
that does not fit, is an error in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.launch.config._flag import Flag, UsageError


def config_path(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the file that ``--config`` names among the flags; "" when there is none.

    >>> config_path(["--nnodes", "2", "--config=job.toml"], {})
    'job.toml'
    """
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if len(name) > 4 and "--config".startswith(name):  # argparse takes a beginning that is no other flag's
            return value if equals else next(iter(argv[place + 1 :]), "")
    return environ.get("PET_CONFIG", "")


def read_config_file(path: str, flags: Sequence[Flag]) -> dict[str, Any]:
    """Return the values of a file by the names of fields. ``UsageError`` for what is no flag, or does not fit."""
    table = _load(path)
    known = {flag.dest: flag for flag in flags if flag.name != "config"}
    found: dict[str, Any] = {}
    for name, value in table.items():
        dest = name.replace("-", "_")
        if dest == "script":
            found["script"] = _text(path, name, value)
        elif dest == "args":
            if not isinstance(value, list):
                raise UsageError(f"{path}: args is {value!r}; expected a list")
            found["args"] = [str(word) for word in value]
        elif dest in known:
            found[dest] = _value(path, known[dest], value)
        else:
            near = difflib.get_close_matches(dest, [*known, "script", "args"], n=1)
            hint = f"did you mean {near[0]}?" if near else "see phalanx run --help"
            raise UsageError(f"{path}: unknown name {name!r}; {hint}")
    return found


def _load(path: str) -> dict[str, Any]:
    try:
        toml = import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = import_module("tomli")
    try:
        table: dict[str, Any] = toml.loads(Path(path).read_text(encoding="utf-8"))
        return table
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None


def _text(path: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{path}: {name} is {value!r}; expected text")
    return value


def _value(path: str, flag: Flag, value: Any) -> Any:
    """Return the value that a flag of this text would have."""
    if flag.kind is None:
        if not isinstance(value, bool):
            raise UsageError(f"{path}: {flag.name} is {value!r}; expected true or false")
        return value
    if isinstance(value, (bool, dict)):
        raise UsageError(f"{path}: {flag.name} is {value!r}; expected what --{flag.name} takes")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        read = flag.kind(text)
    except ValueError:
        raise UsageError(f"{path}: {flag.name} is {value!r}, which does not fit --{flag.name}") from None
    if flag.choices and read not in flag.choices:
        raise UsageError(f"{path}: {flag.name} is {value!r}; expected {', '.join(flag.choices)}")
    return read
