"""What to do when something happens to a generation: pure decisions, no process, store or clock.

Two policies. ``restart``: all workers of the job start anew (torchrun's way). ``heal``: only the dead worker is
replaced, the others keep their processes, provided that they can regroup; all start anew when they cannot. Both count
against ``max_restarts`` of the whole job, in all or within a window of time (``_budget``); when it is used up,
``restart`` fails and ``heal`` goes on with fewer workers as long as every node that is needed has one. Replacements
that die one after the other are no failure to heal, and where workers report steps (or leave a note of what they
compute) none to start anew from either (``_streak``); a node on which workers die again and again is left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from phalanx.launch.recovery import _budget, _streak
from phalanx.launch.recovery._budget import Failure
from phalanx.launch.recovery._contact import Judgement
from phalanx.protocol import Action, Recovery, Streak

STARTS_ANEW = (
    "--on-failure heal: no worker has said that it can regroup (those of phalanx.Job do when it is made; plain scripts "
    "cannot), so all workers start anew; so it will be at every failure, without this line"
)

MAX_PORTS = 5
"""How many ports in a row, each found free a moment before, may turn out to be taken."""


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
    can_regroup: bool = True
    """Whether workers that stay would find those that come: see ``all_can_regroup``."""
    streak: Streak = field(default_factory=Streak)
    ports_taken: int = 0
    max_failures: int = _streak.MAX_ERRORS
    """Failures in a row without a step, after the first, that are taken for bad luck."""
    window: float = 0.0
    """Seconds in which ``max_restarts`` are counted; 0: over the whole job."""
    failures: tuple[Failure, ...] = ()
    """Those that used up restarts so far."""
    node: str = ""
    """This one."""
    time: float = 0.0
    """Seconds since 1970."""

    @property
    def keeps_survivors(self) -> bool:
        return self.heals and self.can_regroup

    @property
    def used(self) -> int:
        """How many restarts count as used up."""
        return _budget.used(self.failures, self.restarts, self.window, self.time)

    @property
    def may_shrink(self) -> bool:
        """Whether the survivors may go on without replacing who was lost."""
        return self.keeps_survivors and not self.is_finishing


def all_can_regroup(workers: Mapping[str, Iterable[str]], declared: Container[str]) -> bool:
    """Return whether the scripts of all roles can: ``workers`` of a generation by role, the living and the dead.

    One worker's word counts for its role, because all workers of a role run the same script: one that is silent while
    another has spoken is still starting, and will find the next generation. Where nobody has spoken, either the script
    cannot regroup, or nobody has got far enough to lose anything: to start anew is right for both.

    >>> all_can_regroup({"trainer": ["a", "b"]}, {"b"}), all_can_regroup({"trainer": ["a", "b"]}, set())
    (True, False)
    """
    return all(any(worker in declared for worker in ids) for ids in workers.values())


def on_failure(
    now: Situation,
    *,
    reason: str,
    is_incurable: bool,
    ends_job: bool = False,
    has_wrong_bits: bool = False,
    streak: Streak | None = None,
) -> Recovery:
    """Return a worker failed. ``is_incurable``: so would its replacement; ``ends_job``: so would the survivors;
    ``has_wrong_bits``: so might any worker of its node; ``streak`` counts its death already.

    >>> now = Situation(heals=False, restarts=1, max_restarts=1, num_nodes=2, min_nodes=1, survivors=1)
    >>> on_failure(now, reason="rank 3 died", is_incurable=False).action.value
    'fail'
    """
    streak = streak or now.streak
    if ends_job:
        return _fail(now, f"{reason}; it stopped the job", limit="do not retry")
    if has_wrong_bits:
        return _part_with_node(now, reason)
    if is_incurable and now.may_shrink and now.is_under_way and now.survivors:
        return _shrink(now, f"{reason}; a replacement would fare no better")
    if is_incurable:
        return _fail(now, f"{reason}; a restart cannot cure that")
    if (now.heals or _streak.knows_progress(streak)) and _streak.is_loop(streak, now.max_failures):
        if now.may_shrink and _streak.others_go_on(streak) and _can_go_on(now):
            return _shrink(now, f"{reason}; {_streak.describe(streak)}, going on with fewer", limit="progress")
        why = f"{_streak.describe(streak, starts_anew=not now.heals)}; another would fare no better"
        return _fail(now, f"{reason}; {why}", limit="progress")
    if now.num_left and now.num_nodes - now.num_left < now.min_nodes:
        nodes = "1 node has" if now.num_left == 1 else f"{now.num_left} nodes have"
        missing = f"without them there are fewer than the {now.min_nodes} that a restart needs"
        return _fail(now, f"{reason}; {nodes} finished and left, and {missing}")
    if now.used < now.max_restarts:
        failures = (*now.failures, Failure(now.time, now.node)) if now.node else now.failures
        left_out = _node_to_leave_out(now, failures, streak)
        if left_out:
            reason += (
                f"; node {left_out} is left out: the last {_budget.NODE_FAILURES} failures were all of its workers"
            )
        return Recovery(
            action=Action.HEAL if now.keeps_survivors else Action.RESTART,
            restarts=now.restarts + 1,
            reason=reason,
            starts_anew=not now.keeps_survivors,
            streak=streak,
            failures=_budget.dump_failures(failures, now.max_restarts),
            leave_out=(left_out,) if left_out else (),
            limit="node" if left_out else "",
        )
    if now.may_shrink and _can_go_on(now):
        return _shrink(now, f"{reason}; no restarts left{_for_now(now)}, going on with fewer", limit="restarts")
    used = f"all {now.max_restarts} restarts are used{_for_now(now)}" if now.max_restarts else "no restarts are allowed"
    if now.is_finishing:
        used += ", and what its script does after the last step may be missing"
    return _fail(now, f"{reason}; {used}", limit="restarts")


def _part_with_node(now: Situation, reason: str) -> Recovery:
    """Go on without a node that computes wrongly, or without the worker that did if there is no other node."""
    if now.keeps_survivors and not now.is_finishing and now.num_nodes - now.num_left - 1 >= max(1, now.min_nodes):
        return Recovery(
            action=Action.HEAL,
            restarts=now.restarts,
            reason=f"{reason}; node {now.node} is left out: what it computes cannot be trusted",
            streak=now.streak,
            failures=_budget.dump_failures(now.failures, now.max_restarts),
            leave_out=(now.node,),
            limit="node",
        )
    if now.may_shrink and now.survivors:
        return _shrink(now, f"{reason}; going on with fewer, since the job needs this node")
    return _fail(now, f"{reason}; the job cannot go on without this node, and what it computes cannot be trusted")


def _node_to_leave_out(now: Situation, failures: tuple[Failure, ...], streak: Streak) -> str:
    """Return the node that is left out from now on; empty: none. Never one without which there would be too few."""
    found = _budget.failing_node(failures, now.time)
    if now.is_finishing or now.num_nodes - now.num_left - 1 < max(1, now.min_nodes) or len(set(streak.hosts)) > 1:
        return ""
    return found


def _for_now(now: Situation) -> str:
    if now.window <= 0:
        return ""
    free = _budget.next_free(now.failures, now.window, now.time)
    return f" within {now.window:g} s (the next is free in {free:.0f} s)"


def on_leave(now: Situation, *, reason: str, is_noticed: bool = False) -> Recovery | None:
    """Return a worker left politely. None when nobody is left to regroup: then the job has simply ended.

    ``is_noticed``: this node was given notice, and has no time to wait until the others are done. If too few of them
    are left to go on, they wait for another node in its place, as when it had been lost.

    >>> two = Situation(heals=True, restarts=0, max_restarts=1, num_nodes=2, min_nodes=2, survivors=0)
    >>> on_leave(two, reason="it left"), on_leave(two, reason="it left", is_noticed=True).action.value
    (None, 'regroup')
    """
    has_others = now.num_nodes - now.num_left - 1 > 0
    if not (_can_go_on(now) or (is_noticed and has_others)):
        return None
    return on_membership_change(now, reason=reason)


def on_lost_contact(now: Situation, judgement: Judgement, hosts_culprit: bool) -> Recovery:
    """Workers lost contact although none has died. ``hosts_culprit``: those to be replaced run on this node.

    >>> from phalanx.protocol import ContactLosses
    >>> now = Situation(heals=True, restarts=0, max_restarts=1, num_nodes=1, min_nodes=1, survivors=3)
    >>> on_lost_contact(now, Judgement(reason="", row=ContactLosses(count=1, step=4)), False).action.value
    'regroup'
    """
    if judgement.is_hopeless:
        return Recovery(action=Action.FAIL, restarts=now.restarts, reason=judgement.reason)
    if not judgement.replace:
        recovery = on_membership_change(now, reason=judgement.reason)
    else:
        left = now.survivors - len(judgement.replace) if hosts_culprit else now.survivors
        after = replace(now, survivors=max(0, left), node=_budget.NOBODY)
        recovery = on_failure(after, reason=judgement.reason, is_incurable=False)
    return replace(recovery, replace=judgement.replace, lost_contact=judgement.row)


def on_membership_change(now: Situation, reason: str) -> Recovery:
    """Nodes wait to be admitted, or one was lost."""
    return Recovery(
        action=Action.REGROUP,
        restarts=now.restarts,
        reason=reason,
        starts_anew=not now.keeps_survivors,
        streak=now.streak,
        failures=_budget.dump_failures(now.failures, now.max_restarts),
    )


def on_port_taken(now: Situation, *, reason: str, is_chosen: bool) -> Recovery:
    """Somebody listens where the workers' store should be. ``is_chosen``: by the user, so no other port will do.

    >>> now = Situation(heals=False, restarts=0, max_restarts=9, num_nodes=1, min_nodes=1, survivors=0)
    >>> [on_port_taken(now, reason="x", is_chosen=chosen).action.value for chosen in (True, False)]
    ['fail', 'regroup']
    """
    count = now.ports_taken + 1
    if is_chosen:
        return _fail(now, reason)
    if count >= MAX_PORTS:
        return _fail(now, f"{reason}; that was the {count}th free port in a row that was taken at once")
    return Recovery(
        action=Action.REGROUP,
        restarts=now.restarts,
        reason=reason,
        starts_anew=not now.keeps_survivors,
        streak=now.streak,
        ports_taken=count,
        failures=_budget.dump_failures(now.failures, now.max_restarts),
    )


def _shrink(now: Situation, reason: str, limit: str = "") -> Recovery:
    failures = _budget.dump_failures(now.failures, now.max_restarts)
    return Recovery(action=Action.SHRINK, restarts=now.restarts, reason=reason, failures=failures, limit=limit)


def _fail(now: Situation, reason: str, limit: str = "") -> Recovery:
    return Recovery(action=Action.FAIL, restarts=now.restarts, reason=reason, limit=limit)


def _can_go_on(now: Situation) -> bool:
    return now.survivors > 0 or now.num_nodes - now.num_left - 1 >= now.min_nodes
