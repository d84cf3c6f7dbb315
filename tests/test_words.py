"""Words have one meaning each: no class name is defined twice, and no private metaphor stands for the field's word.

What the words that are left mean is written in docs/words.md, which these tests read.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "phalanx"

# The field has a word for each of these: patches, without user modes, meta, shared parameters, inline Python
# functions, worker pool, agent channel, recovery, membership, flat buffer, step metadata, ...
BANNED = {
    "book", "books", "crew", "door", "doors", "journal", "ledger", "obey", "paper", "roster", "seat", "slab",
    "surprise", "team", "through", "tie", "ties", "unseen", "veteran",
}  # fmt: skip
# These are plain words inside a function; as the name of a class or a file they hide a shard, a local or a global
# tensor, or a copied view.
BANNED_FOR_CLASSES_AND_FILES = BANNED | {"cut", "fresh", "part", "parts", "stale", "whole"}


def words_of(name: str) -> set[str]:
    """
    >>> sorted(words_of("_leave_from_theDoor"))
    ['door', 'from', 'leave', 'the']
    """
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


@functools.cache
def definitions() -> list[tuple[str, str, Path]]:
    """(kind, name, file) of every class, function and module."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        found.append(("file", path.parent.name if path.stem == "__init__" else path.stem, path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.append(("class", node.name, path))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(("function", node.name, path))
    return found


def classes() -> dict[str, list[Path]]:
    """Where classes are defined, by their names without underscores."""
    found: dict[str, list[Path]] = {}
    for kind, name, path in definitions():
        if kind == "class" and path not in found.setdefault(name.lstrip("_"), []):
            found[name.lstrip("_")].append(path)
    return found


def stems() -> dict[str, list[Path]]:
    """Where private modules lie, by their names."""
    found: dict[str, list[Path]] = {}
    for kind, name, path in definitions():
        if kind == "file" and name.startswith("_") and path.stem != "__init__":
            found.setdefault(name, []).append(path)
    return found


def listed(heading: str) -> set[str]:
    """The names in the first column of a table of docs/words.md."""
    text = (ROOT / "docs" / "words.md").read_text()
    section = re.search(rf"^## [^\n]*\b{heading}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/words.md has no section on {heading}"
    return set(re.findall(r"^\| `(\w+)(?:\.py)?` \|", section[1], re.MULTILINE))


def named_in(tree: ast.AST) -> Iterator[str]:
    """Yield what a module names besides: arguments, attributes, variables, and what it calls its imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def banned_names() -> set[str]:
    return {
        name
        for kind, name, _ in definitions()
        if words_of(name) & (BANNED if kind == "function" else BANNED_FOR_CLASSES_AND_FILES)
    }


def test_no_class_name_is_defined_twice() -> None:
    twice = {name for name, places in classes().items() if len(places) > 1}
    assert twice <= listed("classes"), {name: classes()[name] for name in twice - listed("classes")}
    assert listed("classes") <= twice, "no longer defined twice; take it out of docs/words.md"


def test_a_file_name_that_returns_has_one_meaning() -> None:
    twice = {name for name, places in stems().items() if len(places) > 1}
    unsaid = twice - listed("files")
    assert not unsaid, f"say in docs/words.md what {unsaid} mean everywhere, or call them something else"
    assert listed("files") <= twice, "no longer there twice; take it out of docs/words.md"


def test_no_word_is_defined_twice() -> None:
    text = (ROOT / "docs" / "words.md").read_text()
    rows = re.findall(r"^\| ([^|`]+) \| ", text, re.MULTILINE)
    words = [word.strip() for row in rows if row != "word" for word in re.split("[,/]", row)]
    assert len(words) > 40, "docs/words.md has tables of words"
    twice = sorted({word for word in words if words.count(word) > 1} - {"class", "file"})
    assert not twice, f"docs/words.md defines {twice} more than once"


def test_no_metaphor_stands_for_a_word_of_the_field() -> None:
    assert not banned_names(), sorted(banned_names())


def test_no_metaphor_names_an_argument_an_attribute_or_a_variable() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name in sorted(set(named_in(ast.parse(path.read_text()))))
        if words_of(name) & BANNED
    ]
    assert not wrong, "\n".join(wrong)
