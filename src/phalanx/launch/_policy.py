"""What to do when something happens to a generation: pure decisions, no process, store or clock.

Two policies. ``restart``: all workers of the job start anew (torchrun's way). ``heal``: only the dead worker is
replaced, the others keep their processes. Both count against ``max_restarts`` of the whole job; when it is used up,
``restart`` fails and ``heal`` goes on with fewer workers as long as every node that is needed has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(str, Enum):
    """How a generation ends."""

    RESTART = "restart"
    """All workers stop and start anew; counted."""
    HEAL = "heal"
    """Survivors stay, the dead are replaced; counted."""
    SHRINK = "shrink"
    """Survivors stay, the dead are not replaced."""
    REGROUP = "regroup"
    """The membership changes for another reason than a failure; not counted."""
    FAIL = "fail"
    """The job is over."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The one decision about the end of a generation that all agents obey."""

    action: Action
    restarts: int
    """Restarts used up once this is carried out."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an agent knows when workers of its node have ended."""

    heals: bool
    restarts: int
    max_restarts: int
    num_nodes: int
    min_nodes: int
    survivors: int
    """Workers of this node that are still running."""
    is_under_way: bool = False
    """Whether this is not the first generation: then workers have started well before."""
    num_left: int = 0
    """Nodes whose workers have all succeeded, and that have left since: no later generation can have them."""
    is_finishing: bool = False
    """Whether all steps are done: what a script does after them every worker does itself, so none may be missing."""


def on_failure(now: Situation, *, reason: str, is_incurable: bool) -> Verdict:
    """A worker failed.

    >>> now = Situation(heals=False, restarts=1, max_restarts=1, num_nodes=2, min_nodes=1, survivors=1)
    >>> on_failure(now, reason="rank 3 died", is_incurable=False).action.value
    'fail'
    """
    if is_incurable and now.heals and now.is_under_way and now.survivors and not now.is_finishing:
        return Verdict(
            action=Action.SHRINK,
            restarts=now.restarts,
            reason=f"{reason}; a replacement would fare no better",
        )
    if is_incurable:
        return Verdict(
            action=Action.FAIL, restarts=now.restarts, reason=f"{reason}; a restart cannot cure that"
        )
    if now.num_left and now.num_nodes - now.num_left < now.min_nodes:
        nodes = "1 node has" if now.num_left == 1 else f"{now.num_left} nodes have"
        return Verdict(
            action=Action.FAIL,
            restarts=now.restarts,
            reason=f"{reason}; {nodes} finished and left, and without them there are fewer than the "
            f"{now.min_nodes} that a restart needs",
        )
    if now.restarts < now.max_restarts:
        action = Action.HEAL if now.heals else Action.RESTART
        return Verdict(action=action, restarts=now.restarts + 1, reason=reason)
    if now.heals and _can_go_on(now) and not now.is_finishing:
        return Verdict(
            action=Action.SHRINK,
            restarts=now.restarts,
            reason=f"{reason}; no restarts left, going on with fewer",
        )
    used = f"all {now.max_restarts} restarts are used" if now.max_restarts else "no restarts are allowed"
    if now.is_finishing:
        used += ", and what its script does after the last step may be missing"
    return Verdict(action=Action.FAIL, restarts=now.restarts, reason=f"{reason}; {used}")


def on_leave(now: Situation, *, reason: str) -> Verdict | None:
    """A worker left politely. None when nobody is left to regroup: then the job has simply ended."""
    if not _can_go_on(now):
        return None
    return Verdict(action=Action.REGROUP, restarts=now.restarts, reason=reason)


def on_membership_change(now: Situation, *, reason: str) -> Verdict:
    """Nodes wait to be admitted, or one was lost."""
    return Verdict(action=Action.REGROUP, restarts=now.restarts, reason=reason)


def _can_go_on(now: Situation) -> bool:
    return now.survivors > 0 or now.num_nodes - now.num_left - 1 >= now.min_nodes
