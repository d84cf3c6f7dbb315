"""What the user allows: implicit communication, implicit replicas, operations without a rule.

Owns the per-rank settings and their context managers, and the counter of fallbacks. Settings belong to the thread,
which is the rank in a simulation and the trainer in a real process.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from phalanx.errors import PhalanxError
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._log import TRAFFIC, log_fallback, logger

CommMode = Literal["auto", "warn", "explicit"]
FallbackPolicy = Literal["auto", "warn", "error"]
_PACKAGE = str(Path(__file__).parents[2])


class ImplicitCommunicationError(PhalanxError, RuntimeError):
    """An operation would have to communicate, and the mode is ``explicit``."""


class NoShardingRule(PhalanxError, NotImplementedError):
    """An operation has no sharding rule, and the fallback policy is ``error``."""


class _Settings(threading.local):
    comm: CommMode = "auto"
    fallback: FallbackPolicy = "auto"
    implicit_replication: bool = False
    before_recompute: tuple[Callable[[], None], ...] = ()
    """Called before a checkpointed forward of now runs again; what they raise is raised out of backward."""

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.logged_fallbacks: set[tuple[str, str]] = set()


settings = _Settings()


@contextmanager
def communication_mode(mode: CommMode) -> Iterator[None]:
    """``explicit``: an operation raises that would have to communicate, now or in backward; ``warn``: it warns.

    >>> with communication_mode("explicit"):   # doctest: +SKIP
    ...     y = model(x)
    """
    if mode not in ("auto", "warn", "explicit"):
        raise ValueError(f"communication_mode({mode!r}): expected auto, warn or explicit")
    previous, settings.comm = settings.comm, mode
    try:
        yield
    finally:
        settings.comm = previous


@contextmanager
def fallback_policy(policy: FallbackPolicy) -> Iterator[None]:
    """Say what happens to operations without a rule: computed replicated (``auto``), also ``warn``, or ``error``."""
    if policy not in ("auto", "warn", "error"):
        raise ValueError(f"fallback_policy({policy!r}): expected auto, warn or error")
    previous, settings.fallback = settings.fallback, policy
    try:
        yield
    finally:
        settings.fallback = previous


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Plain tensors that meet DTensors inside the block count as replicas (the same on every rank)."""
    previous, settings.implicit_replication = settings.implicit_replication, True
    try:
        yield
    finally:
        settings.implicit_replication = previous


def under_these_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` run, whenever and on whichever thread it is called, under the modes that hold now."""
    modes = (settings.comm, settings.fallback, settings.implicit_replication)
    checks = settings.before_recompute

    def run(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            check()
        previous = (settings.comm, settings.fallback, settings.implicit_replication)
        settings.comm, settings.fallback, settings.implicit_replication = modes
        try:
            return function(*args, **kwargs)
        finally:
            settings.comm, settings.fallback, settings.implicit_replication = previous

    return run


def fallback_counts() -> dict[str, int]:
    """Say how often each operation ran without a rule on this rank."""
    return dict(settings.fallbacks)


def note_fallback(op: str, inputs: Sequence[Spec]) -> None:
    """Count an operation that runs replicated; warn or refuse as the policy says."""
    settings.fallbacks[op] += 1
    if settings.fallback == "auto" and not logger.isEnabledFor(TRAFFIC):
        return
    layouts = ", ".join(map(repr, inputs))
    if logger.isEnabledFor(TRAFFIC) and (op, layouts) not in settings.logged_fallbacks:
        settings.logged_fallbacks.add((op, layouts))
        log_fallback(inputs[0].mesh.get_rank(), op, layouts, user_line())
    if settings.fallback == "auto":
        return
    message = f"{op} on {layouts} has no sharding rule and is computed replicated (at {user_line()})"
    if settings.fallback == "error":
        raise NoShardingRule(f"{message}; use register_sharding, local_map, or fallback_policy('auto')")
    warnings.warn(message, stacklevel=2)


def user_line() -> str:
    """``file:line`` of the innermost frame outside of phalanx and of torch."""
    for frame in _frames_outside():
        if "/torch/" not in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "?"


def calling_code() -> CodeType | None:
    """Return the code of the innermost frame outside of phalanx."""
    return next((frame.f_code for frame in _frames_outside()), None)


def _frames_outside() -> Iterator[FrameType]:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith((_PACKAGE, "<runner")):
            yield frame
