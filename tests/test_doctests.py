"""The examples in docstrings hold: every one of them, in all packages, in this process."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import phalanx

pytestmark = pytest.mark.fast

PACKAGES = [module.name for module in pkgutil.iter_modules(phalanx.__path__) if module.name != "__main__"]


def modules_of(top: str) -> list[str]:
    module = importlib.import_module(top)
    below = pkgutil.walk_packages(getattr(module, "__path__", []), f"{top}.")
    return [top, *(found.name for found in below if not found.name.endswith("__main__"))]


def examples(module: ModuleType) -> Iterator[doctest.DocTest]:
    """Those of every docstring in a module's file, also of names that say they belong to the package above it."""
    path = Path(str(module.__file__))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and ">>> " in str(node.value.value):
            text, line = str(node.value.value), node.lineno
            yield doctest.DocTestParser().get_doctest(text, dict(vars(module)), module.__name__, str(path), line)


@pytest.mark.parametrize("top", [*(f"phalanx.{name}" for name in PACKAGES), "benchmarks", "tools", "tests.test_meta"])
def test_examples_in_docstrings_hold(top: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for name in modules_of(top):
        module = importlib.import_module(name)
        for test in examples(module):
            said: list[str] = []
            runner.run(test, out=said.append)
            assert not said, "".join(said)
