"""``PHALANX_LOGS="dtensor"`` (what communicates, fallbacks) and ``"+dtensor"`` (every decision).

Owns the logger, reading the variable and the lines. Costs nothing after a decision is cached: it logs when one is made,
each redistribution at its first run, each fallback at its first for the layouts it meets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.tensor._decision import Decision
    from phalanx.tensor._plan import Plan
    from phalanx.tensor._rule import In

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


def log_decision(name: str, inputs: Sequence[In], decision: Decision, num_choices: int) -> None:
    """What came in, what was chosen, what that moves, and why."""
    if not logger.isEnabledFor(logging.INFO):
        return
    call, outs = _call(name, inputs), ", ".join(out.layout for out in decision.outputs)
    if decision.moves:
        moved = "; ".join(f"input {i}: {route.plan!r}" for i, route in decision.moves)
        logger.info(
            "%s -> %s, moves %s: the fewest bytes of %d choices an axis", call, outs, moved, num_choices
        )
    else:
        logger.debug("%s -> %s, moves nothing", call, outs)


def log_no_layout(name: str, inputs: Sequence[In], why: str) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s: %s", _call(name, inputs), why)


def log_fallback(name: str, layouts: str, line: str) -> None:
    logger.info("%s(%s) is computed replicated, at %s", name, layouts, line)


def log_redistribution(plan: Plan) -> None:
    if logger.isEnabledFor(logging.INFO):
        source, target = plan.source, plan.target
        level = logging.INFO if plan.communicates else logging.DEBUG
        rank, steps = source.mesh.get_rank(), "; ".join(map(repr, plan.steps))
        logger.log(level, "rank %d: %r -> %s: %s", rank, source, target.layout, steps)


def _call(name: str, inputs: Sequence[In]) -> str:
    given = ", ".join(repr(one.spec) for one in inputs)
    return f"rank {inputs[0].spec.mesh.get_rank()}: {name}({given})"
