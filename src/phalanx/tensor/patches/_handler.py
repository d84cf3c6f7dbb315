"""Which handler runs a torch function on DTensors.

Owns ``find_handler``, asked once for each function. In this order: a special handler (``_special.py``), running a
Python function through (``_through.py``), a sharding rule (``_dispatch.py``), computing replicated (``_fallback.py``).
"""

from __future__ import annotations

import functools
from typing import Any

from phalanx.tensor.core._dtensor import handlers
from phalanx.tensor.dispatch._fallback import run_replicated
from phalanx.tensor.dispatch._inline_python import run_through, through
from phalanx.tensor.dispatch._run import run_rule
from phalanx.tensor.ops._names import op_name
from phalanx.tensor.ops.rules import DIRECT_PYTHON, RULES
from phalanx.tensor.patches._special import special_handler
from phalanx.tensor.patches._torch_functions import while_tracing


def find_handler(func: Any) -> Any:
    """Decide once how a torch function is handled."""
    name = op_name(func)
    handler = special_handler(func, name)
    if handler is None:
        body = None if func in DIRECT_PYTHON else through(func)
        if body is not None:
            handler = functools.partial(run_through, body)
        elif name.base in RULES:
            handler = run_rule
        else:
            handler = run_replicated
    handlers[func] = handler
    checked = while_tracing(handler)
    if checked is not None:
        handlers.pop(func, None)
        return checked
    return handler
