"""Finds the commands of ``phalanx`` and their flags, without importing what they run: some of them need torch.

A command is a function that makes a parser. Its ``add_argument`` calls are read, and those of functions of ours that it
hands the parser to. ``phalanx run`` has a table of flags instead, which needs the standard library only.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.site._tree import FUNCTIONS, resolve

ARGUMENTS = {"training_script": "what every worker runs", "training_script_args": "its arguments"}


@dataclass(frozen=True)
class FlagRow:
    """One flag, or an argument without dashes, as a table shows it."""

    names: tuple[str, ...]
    takes: str
    default: str
    help: str

    @property
    def long(self) -> str:
        """Its name with two dashes; empty for an argument."""
        return next((name for name in self.names if name.startswith("--")), "")


def table() -> Mapping[str, tuple[str, str]]:
    """By command: the module and function that run it, as ``module:function``, and what it does."""
    found: Mapping[str, tuple[str, str]] = importlib.import_module("phalanx.__main__").COMMANDS
    return found


def commands() -> Mapping[str, str]:
    """By command: what it does."""
    return {command: about for command, (_, about) in table().items()}


@functools.cache
def flags_of(command: str) -> tuple[FlagRow, ...]:
    """The flags and arguments of a command."""
    if command == "run":
        flags = importlib.import_module("phalanx.launch.cli._flags").FLAGS
        rows = [_row_of_table(flag) for flag in flags]
        return (*rows, *(FlagRow((name,), "", "", about) for name, about in ARGUMENTS.items()))
    module, _, function = table()[command][0].partition(":")
    return tuple(_row_of_call(call) for call in _additions(module, function or "main", set()))


def _row_of_table(flag: Any) -> FlagRow:
    """A row of a ``Flag`` of the launcher."""
    names = (*([f"-{flag.short}"] if flag.short else []), f"--{flag.name}")
    takes = "a value" if flag.kind else ""
    if flag.choices:
        takes = ", ".join(f"`{choice}`" for choice in flag.choices)
    default = "" if flag.default in (None, "", False, [], ()) else str(flag.default)
    return FlagRow(names, takes, default, flag.help)


def _additions(module: str, function: str, seen: set[tuple[str, str]]) -> Iterator[ast.Call]:
    """Calls of ``add_argument`` in a function, and in those of ours that get or make its parser."""
    found = resolve(module, function)
    if (found.module, found.name) in seen or not isinstance(found.node, FUNCTIONS):
        return
    seen.add((found.module, found.name))
    for call in ast.walk(found.node):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            yield call
        elif isinstance(call.func, ast.Name) and _is_about_parsers(call):
            try:
                yield from _additions(found.module, call.func.id, seen)
            except KeyError:
                continue  # a name of somebody else


def _is_about_parsers(call: ast.Call) -> bool:
    words = [ast.unparse(call.func), *(ast.unparse(argument) for argument in call.args)]
    return any("parser" in word.lower() for word in words)


def _row_of_call(call: ast.Call) -> FlagRow:
    words = {word.arg: word.value for word in call.keywords}
    names = tuple(str(ast.literal_eval(argument)) for argument in call.args)
    action = ast.unparse(words["action"]).strip("'") if "action" in words else ""
    takes = "" if action.startswith("store_") or not names[0].startswith("-") else "a value"
    if "choices" in words:
        takes = _choices(words["choices"])
    default = _text(words.get("default"))
    about = _text(words.get("help")).replace("%(default)s", default)
    shown = tuple(name for name in names if not re.match(r"--\w+_", name))  # the same flag, with underscores
    return FlagRow(shown, takes, default, about)


def _choices(node: ast.expr) -> str:
    try:
        return ", ".join(f"`{choice}`" for choice in ast.literal_eval(node))
    except ValueError:
        return "one of a list that `--help` shows"


def _text(node: ast.expr | None) -> str:
    """A literal as text; nothing for what says nothing."""
    if node is None:
        return ""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return "" if value in (None, "", False, [], ()) else str(value)
