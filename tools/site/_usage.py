"""Finds who uses what: imports between modules, the tests that name a definition, and when a file last changed.

All of it by reading: a test counts for a name if its file imports it, or reaches it by attributes of a module that it
imports.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.site._tree import ROOT, modules, resolve

TESTS = ROOT / "tests"
Key = tuple[str, str]


@functools.cache
def imports_of(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules of ours and packages of others that a module imports, wherever in it."""
    ours, others = set(), set()
    for node in modules()[module].nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            longer = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else str(node.module) for name in longer]
        for name in names:
            if name in modules() and name != module:
                ours.add(name)
            elif name.split(".")[0] not in (*sys.stdlib_module_names, "phalanx"):
                others.add(name.split(".")[0])
    return tuple(sorted(ours)), tuple(sorted(others))


@functools.cache
def importers() -> Mapping[str, tuple[str, ...]]:
    """By module: the modules of ours that import it."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for other in imports_of(module)[0]:
            found.setdefault(other, []).append(module)
    return {module: tuple(others) for module, others in found.items()}


def names_used(tree: ast.Module) -> set[str]:
    """Dotted names of ours that a file imports, or reaches through what it imported.

    >>> sorted(names_used(ast.parse("from phalanx import shard as s; s.save(1)")))
    ['phalanx.shard', 'phalanx.shard.save']
    """
    known: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "phalanx":
                    known[alias.asname or "phalanx"] = alias.name if alias.asname else "phalanx"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "phalanx":
            known.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    found = set(known.values())
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, *rest = _chain(node)
            if first in known:
                found.add(".".join([known[first], *rest]))
    return found


def _chain(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; an empty one where something else than a name begins it."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def definition_of(dotted: str) -> Key | None:
    """The module that defines what a dotted name means, and its name there; "" for the module itself."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        if module in modules():
            if cut == len(parts):
                return module, ""
            try:
                found = resolve(module, parts[cut])
            except KeyError:
                return None
            return found.module, found.name
    return None


@functools.cache
def tests_of() -> Mapping[Key, tuple[str, ...]]:
    """By definition: the files of tests that name it, also programs that tests run; test modules first."""
    found: dict[Key, set[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for dotted in names_used(ast.parse(path.read_text())):
            if key := definition_of(dotted):
                found.setdefault(key, set()).add(path.relative_to(ROOT).as_posix())
    for key, files in _parity_tests().items():
        found.setdefault(key, set()).update(files)
    return {key: tuple(sorted(files, key=lambda file: ("/test_" not in file, file))) for key, files in found.items()}


def _parity_tests() -> Mapping[Key, set[str]]:
    """The tests that docs/parity.md gives for a name."""
    found: dict[Key, set[str]] = {}
    for line in (ROOT / "docs" / "parity.md").read_text().splitlines():
        files = {file for file in re.findall(r"`(tests/[\w/]+\.py)", line) if (ROOT / file).exists()}
        for dotted in re.findall(r"`(phalanx[\w.]+)`", line) if files else ():
            if key := definition_of(dotted):
                found.setdefault(key, set()).update(files)
    return found


@functools.cache
def last_changes() -> Mapping[str, str]:
    """By file: the day and the commit of its last change; nothing outside of a clone."""
    command = ["git", "log", "--format=@%as, %h", "--name-only", "--", "src", "tests"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, str] = {}
    commit = ""
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line:
            found.setdefault(line, commit)
    return found


def size_of(path: Path) -> str:
    """
    >>> size_of(Path(__file__)).endswith(" lines")
    True
    """
    return f"{len(path.read_text().splitlines())} lines"
