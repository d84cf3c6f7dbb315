"""``PHALANX_LOGS="dtensor"`` (what communicates, fallbacks) and ``"+dtensor"`` (every decision).

Owns the logger, reading the variable and the lines. Costs nothing after a decision is cached: it logs when one is made,
each redistribution at its first run, each fallback at its first for the layouts it meets. No line is above DEBUG: every
rank writes its own, and a program that shows INFO has not asked for them. Collectives that belong to no
plan (sums of gradients, ``distribute_tensor``, ``from_local``) are listened to, only while the log is on, and logged at
the first for a layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from phalanx.comm import CommEvent, observe
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._plan import Plan

logger = logging.getLogger("phalanx.dtensor")

TRAFFIC = logging.DEBUG
"""What communicates, or is computed replicated."""
EVERYTHING = 5
"""Decisions that move nothing too."""


def configure(setting: str | None = None) -> None:
    """Switch logging on by ``setting``, or by the variable ``PHALANX_LOGS`` (comma-separated)."""
    text = os.environ.get("PHALANX_LOGS", "") if setting is None else setting
    names = {part.strip() for part in text.split(",")}
    level = EVERYTHING if "+dtensor" in names else TRAFFIC if "dtensor" in names else None
    if level is None:
        return
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # whatever handler the program has would write each line once more


def log_fallback(rank: int, name: str, layouts: str, line: str) -> None:
    logger.log(TRAFFIC, "rank %d: %s(%s) is computed replicated, at %s", rank, name, layouts, line)


def log_redistribution(plan: Plan) -> None:
    if logger.isEnabledFor(TRAFFIC):
        source, target = plan.source, plan.target
        level = TRAFFIC if plan.communicates else EVERYTHING
        rank, steps = source.mesh.get_rank(), "; ".join(map(repr, plan.steps))
        logger.log(level, "rank %d: %r -> %s: %s", rank, source, target.layout, steps)


Heard = Sequence[CommEvent]


class _NotListening:
    def __enter__(self) -> Heard:
        return ()

    def __exit__(self, *error: object) -> None:
        pass


_NOT_LISTENING = _NotListening()


def listening() -> AbstractContextManager[Heard]:
    """Return the collectives of a block, for ``log_collectives``; none while the log is off."""
    return _listen() if logger.isEnabledFor(TRAFFIC) else _NOT_LISTENING


@contextmanager
def _listen() -> Iterator[Heard]:
    heard: list[CommEvent] = []
    with observe(heard.append):
        yield heard


def log_collectives(what: str, spec: Spec, heard: Heard) -> None:
    """Log the collectives the first time that there are some for ``what`` and this layout."""
    if heard and ("logged", what) not in spec.variants:
        spec.variants["logged", what] = True
        said = "; ".join(f"{event.name} {event.nbytes} B" for event in heard)
        logger.log(TRAFFIC, "rank %d: %s %r: %s", spec.mesh.get_rank(), what, spec, said)
