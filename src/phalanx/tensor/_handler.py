"""Which handler runs a torch function on DTensors.

Owns ``find_handler``, asked once for each function. In this order: a special handler (``_special.py``), running a
Python function through (``_through.py``), a sharding rule (``_dispatch.py``), computing replicated (``_fallback.py``).
"""

from __future__ import annotations

import functools
from typing import Any

from phalanx.tensor._dispatch import run_rule
from phalanx.tensor._doors import while_tracing
from phalanx.tensor._dtensor import _handlers
from phalanx.tensor._fallback import run_replicated
from phalanx.tensor._names import op_name
from phalanx.tensor._special import special_handler
from phalanx.tensor._through import run_through, through
from phalanx.tensor.rules import DIRECT_PYTHON, RULES


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
    _handlers[func] = handler
    checked = while_tracing(handler)
    if checked is not None:
        _handlers.pop(func, None)
        return checked
    return handler
