"""Does something right after a module of somebody else's has been imported, without importing it.

Owns the finder that waits for one module, once. Nothing here knows what is waited for, nor imports torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """``action(module)`` when ``name`` is imported; the caller has looked that it was not yet. Asking twice is once."""
    if not any(isinstance(f, _Finder) and (f.name, f.action) == (name, action) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder:
    """No ``MetaPathFinder``: that class's module costs as much as all of what ``import phalanx`` does."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            loader.exec_module = execute_and_act
        return spec
