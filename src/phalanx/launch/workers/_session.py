"""Functions that exist in this process only: typed at a prompt or in a notebook's cell, not in any file.

Pickle sends a function by the name of its module, and a fresh interpreter finds no file behind the ``__main__`` of a
session. Its memory can only be copied: such functions are forked, whatever start method was asked for.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def method_that_works(fn: Callable[..., Any], args: tuple[Any, ...], method: str) -> str:
    """``method``, or ``fork`` (and a line that says so) where nothing else can bring the function to its workers."""
    why = "" if method == "fork" else why_only_here(fn, args)
    if not why:
        return method
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise TypeError(
            f"{why}, so that its workers must be forked; but this process has used CUDA, which forks cannot. Write the "
            "function to a file (%%writefile in a notebook) and import it"
        )
    log.warning("%s: its workers are forked from this process (start_method='fork', not %r)", why, method)
    return "fork"


def why_only_here(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Why a fresh interpreter could not find the function or its arguments; "" when it can, or pickle itself refuses.

    >>> why_only_here(os.getcwd, ())
    ''
    """
    try:
        mentions_main = b"__main__" in pickle.dumps((fn, args))
    except Exception:  # whoever sends them says what is wrong
        return ""
    if not mentions_main:
        return ""
    name = getattr(fn, "__qualname__", repr(fn))
    if not _has_a_file(sys.modules["__main__"]):
        return f"the function {name} or its arguments are defined in an interactive session"
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if fn.__module__ == "__main__" and code is not None and not os.path.exists(code.co_filename):
        return f"the function {name} was typed into an interactive session"
    return ""


def _has_a_file(main: Any) -> bool:
    if getattr(main, "__spec__", None) is not None:
        return True  # python -m name: found by that name again
    return os.path.exists(getattr(main, "__file__", None) or "")
