"""Who begins a job's own etcd: the rules, and every order of starts, losses, words and cuts of a small job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from phalanx.launch.rendezvous._etcd_founding import (
    Founding,
    RecordChoice,
    decide_founding,
    decide_telling,
)
from phalanx.protocol import ClusterRecord

pytestmark = pytest.mark.fast

ELDER = ClusterRecord(founder="a", began=1.0, members=("a:1",))
YOUNGER = ClusterRecord(founder="b", began=2.0, members=("b:1",))


def found(
    known: ClusterRecord | None = None, *, num_fresh: int = 1, waited: float = 9.0, min_nodes: int = 2
) -> Founding:
    return decide_founding(known, num_fresh=num_fresh, waited=waited, min_nodes=min_nodes, grace=3.0)


def tell(own: ClusterRecord, seen: ClusterRecord | None, *, acts: bool = False, lives: bool = True) -> RecordChoice:
    return decide_telling(own, seen, acts=acts, answers=lambda _: lives)


def test_a_cluster_that_is_known_is_joined_and_nobody_begins_one_alone():
    assert found(ELDER, num_fresh=9) is Founding.JOIN
    assert found(num_fresh=1, waited=900.0) is Founding.WAIT, "it may be one that returns"
    assert found(num_fresh=2, waited=2.9) is Founding.WAIT
    assert found(num_fresh=2, waited=3.0) is Founding.BEGIN
    assert found(num_fresh=1, waited=3.0, min_nodes=1) is Founding.BEGIN


def test_an_endpoint_is_told_what_it_does_not_know_and_by_the_acting_member_what_has_changed():
    assert tell(ELDER, None) is RecordChoice.WRITE
    changed = replace(ELDER, members=("c:1", "d:1"))
    assert tell(ELDER, changed) is RecordChoice.NOTHING, "another member knows better"
    assert tell(ELDER, changed, acts=True) is RecordChoice.WRITE
    assert tell(ELDER, ELDER, acts=True) is RecordChoice.NOTHING


def test_the_younger_of_two_is_given_up_for_an_elder_that_lives():
    assert tell(ELDER, YOUNGER) is RecordChoice.WRITE
    assert tell(YOUNGER, ELDER) is RecordChoice.GIVE_UP
    assert tell(YOUNGER, ELDER, lives=False) is RecordChoice.WRITE, "only its record was left"


# -- every order --------------------------------------------------------------------------------------------------

NODES = (0, 1, 2)
"""Node 0 has the only endpoint."""
OFF, FRESH = -2, -1


@dataclass(frozen=True)
class State:
    """A job: what each node is in (a cluster's number, ``FRESH`` at the endpoint, ``OFF``), and what that knows."""

    place: tuple[int, ...] = (OFF, OFF, OFF)
    record: int = -1  # the cluster that the served endpoint names; -1: none
    is_late: bool = False  # the grace of the served endpoint is over
    count: int = 0  # clusters that were ever begun: the next one's number, so the lower the elder
    is_cut: bool = False  # node 0 and the others do not reach each other
    starts: int = 0

    def living(self) -> set[int]:
        return {place for place in self.place if place >= 0}

    def at(self, node: int, place: int, **changes: object) -> State:
        return replace(self, place=(*self.place[:node], place, *self.place[node + 1 :]), **changes)  # type: ignore[arg-type]  # named below


def record_of(number: int) -> ClusterRecord | None:
    return None if number < 0 else ClusterRecord(founder=f"n{number}", began=float(number), members=(f"m{number}",))


def next_states(now: State, *, min_nodes: int, is_timely: bool, may_cut: bool, max_starts: int) -> Iterator[State]:
    """All that can happen next. ``is_timely``: who lives tells an endpoint that is served within its grace."""
    is_open = now.place[0] != OFF
    for node in NODES:
        reaches = is_open and (node == 0 or not now.is_cut)
        if now.place[node] == OFF:
            if now.starts < max_starts:
                new = now.at(node, FRESH, starts=now.starts + 1)
                yield replace(new, record=-1, is_late=False) if node == 0 else new
            continue
        lost = now.at(node, OFF)
        yield replace(lost, record=-1, is_late=False) if node == 0 else lost
        # A cluster of which nobody lives does not answer: then it waits on.
        if now.place[node] == FRESH and node != 0 and reaches and now.record in now.living():
            yield now.at(node, now.record)
        if now.place[node] >= 0 and reaches:
            yield from after_telling(now, node)
    if is_open and now.place[0] == FRESH:
        yield from at_first_endpoint(now, min_nodes)
    if is_open and not now.is_late:
        is_told = now.record >= 0 or not now.living()
        if is_told or not is_timely:
            yield replace(now, is_late=True)
    if may_cut:
        yield replace(now, is_cut=not now.is_cut)


def after_telling(now: State, node: int) -> Iterator[State]:
    own = now.place[node]
    mine, other = record_of(own), record_of(now.record)
    assert mine is not None
    action = decide_telling(mine, other, acts=False, answers=lambda _: now.record in reached(now, node))
    if action is RecordChoice.WRITE:
        yield replace(now, record=own)
    elif action is RecordChoice.GIVE_UP:  # the agents of that cluster end
        place = tuple(OFF if each == own else each for each in now.place)
        yield replace(now, place=place) if place[0] != OFF else replace(now, place=place, record=-1, is_late=False)


def reached(now: State, node: int) -> set[int]:
    """The clusters that a node can ask something."""
    side = [other for other in NODES if not now.is_cut or (other == 0) == (node == 0)]
    return {now.place[other] for other in side if now.place[other] >= 0}


def at_first_endpoint(now: State, min_nodes: int) -> Iterator[State]:
    num_fresh = sum(now.place[node] == FRESH and (node == 0 or not now.is_cut) for node in NODES)
    waited = 9.0 if now.is_late else 0.0
    action = decide_founding(record_of(now.record), num_fresh=num_fresh, waited=waited, min_nodes=min_nodes, grace=3.0)
    if action is Founding.JOIN:
        if now.record in reached(now, 0):
            yield now.at(0, now.record)
        else:
            yield replace(now, record=-1)  # it does not answer, and is forgotten
    elif action is Founding.BEGIN:
        yield now.at(0, now.count, record=now.count, count=now.count + 1)


def explore(*, min_nodes: int, is_timely: bool, may_cut: bool, max_starts: int = 6) -> dict[State, set[State]]:
    """All states that can be reached, and what can follow each."""
    first = State()
    follow: dict[State, set[State]] = {}
    ahead = deque([first])
    while ahead:
        now = ahead.popleft()
        if now not in follow:
            follow[now] = set(
                next_states(now, min_nodes=min_nodes, is_timely=is_timely, may_cut=may_cut, max_starts=max_starts)
            )
            ahead.extend(follow[now])
    return follow


@pytest.mark.parametrize("min_nodes", [1, 2, 3])
def test_no_second_cluster_is_begun_while_one_lives_that_is_heard_in_time(min_nodes):
    states = explore(min_nodes=min_nodes, is_timely=True, may_cut=False)
    assert max(state.count for state in states) > 1, "there is another one when all of the first are gone"
    assert all(len(state.living()) <= 1 for state in states)


def test_however_late_it_is_heard_a_cluster_with_enough_nodes_is_never_given_a_rival():
    states = explore(min_nodes=2, is_timely=False, may_cut=True)
    num_rivals = 0
    for now, following in states.items():
        for after in following:
            if after.count > now.count and now.living():
                num_rivals += 1
                assert all(now.place.count(number) < 2 for number in now.living()), (now, after)
    assert num_rivals, "one with too few nodes, which nobody hears, may be given one"


@pytest.mark.parametrize("min_nodes", [1, 2])
def test_of_two_clusters_one_is_left_when_they_hear_of_each_other(min_nodes):
    num_rivals = 0
    for state in explore(min_nodes=min_nodes, is_timely=False, may_cut=True, max_starts=5):
        now = replace(state, is_cut=False)
        num_rivals += len(now.living()) > 1
        if now.place[0] == OFF:
            now = now.at(0, FRESH, record=-1, is_late=False)
        for _ in range(3):
            for node in NODES:
                if now.place[0] != OFF and now.place[node] >= 0:
                    now = next(after_telling(now, node), now)
        if now.place[0] != OFF:
            assert len(now.living()) <= 1, (state, now)
    assert num_rivals
