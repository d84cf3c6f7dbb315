"""Settings of torch's compilers for all threads: what ``config.patch`` sets holds for the thread that set it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo


@contextmanager
def in_all_threads(config: Any, name: str, value: Any) -> Iterator[None]:
    """``name`` of a module of settings is ``value``, unless a thread has one of its own."""
    entry = config._config[name]
    before, entry.default = entry.default, value
    try:
        yield
    finally:
        entry.default = before


def recompile_limit(limit: int) -> Any:
    """So many graphs of one piece of code: simulated ranks share the code of a function.

    Beyond it Dynamo runs the function as it is, and a comparison with eager compares eager with itself.
    """
    return in_all_threads(torch._dynamo.config, "recompile_limit", limit)
