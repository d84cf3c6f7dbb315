"""Makes ``torch.distributed.init_process_group("phalanx")`` work after ``import phalanx``, without importing torch.

Owns the moment of registration: at once when torch's module is there already, else right after it has been imported.
What it registers imports ``phalanx.comm`` only when a process group is made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

BACKEND = "phalanx"
_C10D = "torch.distributed.distributed_c10d"


def install() -> None:
    """Register now or later; harmless when done before."""
    module = sys.modules.get(_C10D)
    if module is not None and hasattr(module, "Backend"):
        register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register(c10d: Any) -> None:
    """Register the backend with torch's module."""
    if BACKEND.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(common: Any, options: Any) -> Any:
    from phalanx.comm._c10d_backend import create_process_group  # only now: it imports torch and all of comm

    return create_process_group(common)


class _Finder:
    """Waits for the one module, once. No ``MetaPathFinder``: that class's module costs as much as all of ours."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register(module)

            loader.exec_module = execute_and_register
        return spec
