"""``PHALANX_LOGS="dtensor"`` (decisions that communicate, fallbacks) and ``"+dtensor"`` (every decision).

Owns the logger and reading the variable. Costs nothing after a decision is cached: it logs when one is made.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger("phalanx.dtensor")


def configure(setting: str | None = None) -> None:
    """Switch logging on by ``setting``, or by the variable ``PHALANX_LOGS`` (comma-separated)."""
    text = os.environ.get("PHALANX_LOGS", "") if setting is None else setting
    names = {part.strip() for part in text.split(",")}
    level = logging.DEBUG if "+dtensor" in names else logging.INFO if "dtensor" in names else None
    if level is None:
        return
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)


def log_decision(name: str, inputs: list[Any], decision: Any) -> None:
    """One line for a new decision: what came in, what was chosen, what it moves."""
    if not logger.isEnabledFor(logging.INFO):
        return
    given = ", ".join(repr(one.spec) for one in inputs)
    if decision is None:
        logger.info("%s(%s): no layout fits, computed replicated", name, given)
        return
    moved = "; ".join(f"input {i}: {plan!r}" for i, plan in decision.moves)
    outs = ", ".join(out.layout for out in decision.outputs)
    if moved:
        logger.info("%s(%s) -> %s, moves %s", name, given, outs, moved)
    else:
        logger.debug("%s(%s) -> %s", name, given, outs)
