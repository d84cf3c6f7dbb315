"""Keeps torch.compile out of our modules: it breaks the graph there and runs them as they are.

Owns ``install`` and ``run_as_it_is``. Dynamo compiles every Python frame that it meets, and would compile ours, one by
one, with guards on tables that change: slow, and wrong where a function of ours keeps a memory. What users wrote around
calls of ours is compiled as before. Nothing is imported for it: the list of files is told when Dynamo is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from phalanx._after_import import after_import
from phalanx._torch_private import FrameAction, FrameExecStrategy, set_code_exec_strategy

_RULES = "torch._dynamo.trace_rules"
RUNNERS = "<runner "  # how the file names of code begin that we compile ourselves


def install() -> None:
    """Tell Dynamo now or later to skip the files of this package. Does it once."""
    when_imported(_RULES, _skip_ours)


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """``action(module)`` now, if ``name`` was imported, or when it is. Asking twice is once."""
    module = sys.modules.get(name)
    if module is None:
        after_import(name, action)
    else:
        action(module)


def _skip_ours(rules: Any) -> None:
    if RUNNERS not in rules.SKIP_DIRS:
        rules.SKIP_DIRS.append(RUNNERS)
        rules.add("phalanx")


def run_as_it_is(code: CodeType) -> None:
    """Have Dynamo leave frames of ``code`` alone, and every frame that they call: also copies of torch's functions."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
