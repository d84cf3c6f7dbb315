"""What to do when something happens to a generation: pure decisions, no process, store or clock.

Two policies. ``restart``: all workers of the job start anew (torchrun's way). ``heal``: only the dead worker is
replaced, the others keep their processes. Both count against ``max_restarts`` of the whole job; when it is used up,
``restart`` fails and ``heal`` goes on with fewer workers as long as every node that is needed has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from phalanx.launch._contact import Judgement, Row


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
    replace: tuple[str, ...] = ()
    """Workers that run and must not: their agents kill them."""
    lost_contact: Row | None = None
    """When workers had lost contact: how often in a row."""


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


def on_failure(now: Situation, *, reason: str, is_incurable: bool) -> Verdict:
    """A worker failed.

    >>> now = Situation(heals=False, restarts=1, max_restarts=1, num_nodes=2, min_nodes=1, survivors=1)
    >>> on_failure(now, reason="rank 3 died", is_incurable=False).action.value
    'fail'
    """
    if is_incurable and now.heals and now.is_under_way and now.survivors:
        return Verdict(
            action=Action.SHRINK,
            restarts=now.restarts,
            reason=f"{reason}; a replacement would fare no better",
        )
    if is_incurable:
        return Verdict(
            action=Action.FAIL, restarts=now.restarts, reason=f"{reason}; a restart cannot cure that"
        )
    if now.restarts < now.max_restarts:
        action = Action.HEAL if now.heals else Action.RESTART
        return Verdict(action=action, restarts=now.restarts + 1, reason=reason)
    if now.heals and _can_go_on(now):
        return Verdict(
            action=Action.SHRINK,
            restarts=now.restarts,
            reason=f"{reason}; no restarts left, going on with fewer",
        )
    used = f"all {now.max_restarts} restarts are used" if now.max_restarts else "no restarts are allowed"
    return Verdict(action=Action.FAIL, restarts=now.restarts, reason=f"{reason}; {used}")


def on_leave(now: Situation, *, reason: str) -> Verdict | None:
    """A worker left politely. None when nobody is left to regroup: then the job has simply ended."""
    if not _can_go_on(now):
        return None
    return Verdict(action=Action.REGROUP, restarts=now.restarts, reason=reason)


def on_lost_contact(now: Situation, judgement: Judgement, hosts_culprit: bool) -> Verdict:
    """Workers lost contact although none has died. ``hosts_culprit``: those to be replaced run on this node.

    >>> now = Situation(heals=True, restarts=0, max_restarts=1, num_nodes=1, min_nodes=1, survivors=3)
    >>> on_lost_contact(now, Judgement(reason="", row=Row(count=1, step=4)), False).action.value
    'regroup'
    """
    if judgement.is_hopeless:
        return Verdict(action=Action.FAIL, restarts=now.restarts, reason=judgement.reason)
    if not judgement.replace:
        verdict = on_membership_change(now, reason=judgement.reason)
    else:
        left = now.survivors - len(judgement.replace) if hosts_culprit else now.survivors
        after = replace(now, survivors=max(0, left))
        verdict = on_failure(after, reason=judgement.reason, is_incurable=False)
    return replace(verdict, replace=judgement.replace, lost_contact=judgement.row)


def on_membership_change(now: Situation, *, reason: str) -> Verdict:
    """Nodes wait to be admitted, or one was lost."""
    return Verdict(action=Action.REGROUP, restarts=now.restarts, reason=reason)


def _can_go_on(now: Situation) -> bool:
    return now.survivors > 0 or now.num_nodes - 1 >= now.min_nodes
