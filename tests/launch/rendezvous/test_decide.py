"""The pure decisions: when a generation forms, ends and grows, and who gets which rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.rendezvous._decide import End, Form, Idle, Rules, Seen, State, admissible, decide
from phalanx.launch.rendezvous._rank_order import assign_ranks, choose, natural
from phalanx.protocol import MemberNode, Members, NodeRecord

pytestmark = pytest.mark.fast

RULES = Rules(min_nodes=2, max_nodes=4, last_call=30.0, admit_delay=1.0)


def node(name: str, ticket: int = 0, *, wants: int = 0, topology: str = "", rank: int = -1) -> NodeRecord:
    return NodeRecord(
        id=name,
        ticket=ticket or sum(map(ord, name)),
        host=name,
        addr=name,
        port=1,
        local_size=1,
        wants=wants,
        topology=topology,
        fixed_rank=rank,
    )


def seen(*nodes: NodeRecord, since: float = 0.0) -> dict[str, Seen]:
    return {record.id: Seen(record, since) for record in nodes}


def generation(number: int, *nodes: NodeRecord) -> Members:
    return Members(number, tuple(MemberNode.of(record) for record in nodes))


def names(action: object) -> list[str]:
    assert isinstance(action, Form), action
    return [seat.id for seat in action.members.nodes]


def test_fewer_than_min_nodes_wait_without_a_deadline() -> None:
    assert decide(State(nodes=seen(node("a"))), RULES, 1e9) == Idle()


def test_min_nodes_wait_for_the_last_call_and_then_form() -> None:
    state = State(nodes={**seen(node("a")), **seen(node("b"), since=5.0)})
    assert decide(state, RULES, 6.0) == Idle(until=35.0)
    assert names(decide(state, RULES, 35.0)) == ["a", "b"]


def test_max_nodes_form_at_once() -> None:
    state = State(nodes=seen(*(node(name) for name in "dbca")))
    assert names(decide(state, RULES, 0.0)) == ["a", "b", "c", "d"]


def test_a_member_without_lease_breaks_the_generation_and_its_workers_are_named() -> None:
    a, b = node("a"), node("b")
    action = decide(State(nodes=seen(a), current=generation(3, a, b)), RULES, 0.0)
    assert isinstance(action, End)
    assert (action.generation, action.kind) == (3, "broken")
    assert "b lost its lease" in action.cause.reason
    assert action.cause.workers == ("b.3.0",)


def test_a_member_that_came_back_with_a_new_ticket_was_lost() -> None:
    a, b = node("a"), node("b")
    action = decide(State(nodes=seen(a, node("b", 999)), current=generation(0, a, b)), RULES, 0.0)
    assert isinstance(action, End)
    assert action.kind == "broken"


def test_a_new_registration_of_a_member_waits_and_has_no_seat() -> None:
    """It lost its lease and came back: its former self's seat is not its own, and it must not be forgotten."""
    a, b = node("a"), node("b", 1)
    back = node("b", 999)
    current = generation(0, a, b)
    assert current.rank_of("b", 1) == 1
    assert current.rank_of("b", 999) is None
    state = State(nodes=seen(node("a", wants=1), back), current=current, ended="broken")
    assert names(decide(state, Rules(min_nodes=2, max_nodes=2), 0.0)) == ["a", "b"]


def test_a_member_that_leaves_on_its_own_breaks_the_generation() -> None:
    a, b = node("a"), node("b", wants=1)
    action = decide(State(nodes=seen(a, b), current=generation(0, a, b)), RULES, 0.0)
    assert isinstance(action, End)
    assert "b left" in action.cause.reason


def test_a_loss_while_a_new_generation_is_wanted_still_breaks_the_old_one() -> None:
    a, b = node("a"), node("b")
    state = State(nodes=seen(a, node("c")), current=generation(0, a, b), ended="wanted")
    action = decide(state, RULES, 0.0)
    assert isinstance(action, End)
    assert action.kind == "broken"


def test_after_a_break_survivors_form_at_once_without_last_call() -> None:
    a, b, c = node("a", wants=1), node("b", wants=1), node("c")
    state = State(nodes=seen(a, b), current=generation(0, a, b, c), ended="broken")
    assert names(decide(state, RULES, 0.0)) == ["a", "b"]


def test_live_members_are_awaited_for_a_while() -> None:
    a, b, c = node("a", wants=1), node("b", wants=1), node("c")
    state = State(nodes=seen(a, b, c), current=generation(0, a, b, c), ended="broken")
    assert decide(state, RULES, 1.0) == Idle(until=60.0)
    assert names(decide(state, RULES, 60.0)) == ["a", "b"]


def test_a_newcomer_does_not_take_over_while_members_have_yet_to_hear_of_it() -> None:
    a, b = node("a"), node("b")
    rules = Rules(min_nodes=1, max_nodes=2, last_call=0.0, admit_delay=0.0)
    state = State(nodes=seen(a, b), current=generation(0, a), ended="wanted")
    assert decide(state, rules, 1.0) == Idle(until=60.0)


def test_newcomers_are_admitted_when_they_have_been_quiet() -> None:
    a, b = node("a"), node("b")
    nodes = {**seen(a, b), **seen(node("c"), since=10.0)}
    state = State(nodes=nodes, current=generation(0, a, b))
    assert admissible(state, RULES) == 1
    assert decide(state, RULES, 10.5) == Idle(until=11.0)
    action = decide(state, RULES, 11.0)
    assert isinstance(action, End)
    assert action.kind == "wanted"


def test_newcomers_that_make_it_full_are_admitted_at_once() -> None:
    a, b = node("a"), node("b")
    state = State(nodes=seen(a, b, node("c"), node("d"), since=7.0), current=generation(0, a, b))
    assert isinstance(decide(state, RULES, 7.0), End)


def test_a_trickle_of_newcomers_cannot_put_off_admission_for_ever() -> None:
    a, b = node("a"), node("b")
    rules = Rules(min_nodes=2, max_nodes=100, admit_delay=1.0)
    nodes = {**seen(a, b), **{f"n{i}": Seen(node(f"n{i}"), 0.9 * i) for i in range(8)}}
    assert isinstance(decide(State(nodes=nodes, current=generation(0, a, b)), rules, 6.4), End)


def test_a_full_job_keeps_spares_waiting_and_uses_them_after_a_loss() -> None:
    members = [node(name, wants=1) for name in "abcd"]
    current = generation(0, *[node(name) for name in "abcd"])
    running = State(nodes=seen(*(node(name) for name in "abcd"), node("e")), current=current)
    assert decide(running, RULES, 1e6) == Idle()
    assert admissible(running, RULES) == 0
    after = State(nodes=seen(members[0], members[2], members[3], node("e")), current=current, ended="broken")
    assert names(decide(after, RULES, 0.0)) == ["a", "e", "c", "d"]


def test_a_node_that_was_left_out_is_taken_only_if_there_are_too_few_others() -> None:
    left_out = replace(node("b", wants=1), last_choice=True)
    current = generation(0, *[node(name) for name in "abc"])
    after = State(nodes=seen(node("a", wants=1), left_out, node("c", wants=1)), current=current, ended="broken")
    assert names(decide(after, RULES, 0.0)) == ["a", "c"]
    later = State(nodes=seen(node("a", wants=1), node("c", wants=1), left_out), current=generation(1, *map(node, "ac")))
    assert decide(later, RULES, 1e6) == Idle(), "nobody is disturbed for it"
    assert admissible(later, RULES) == 0
    few = State(nodes=seen(node("a", wants=2), replace(left_out, wants=2)), current=later.current, ended="broken")
    assert names(decide(few, RULES, 0.0)) == ["a", "b"]


def test_a_closed_job_decides_nothing() -> None:
    assert decide(State(nodes=seen(*(node(n) for n in "abcd")), closed=True), RULES, 0.0) == Idle()


def test_fixed_ranks_are_kept_and_two_of_the_same_rank_do_not_count_twice() -> None:
    rules = Rules(min_nodes=2, max_nodes=2)
    twice = seen(node("a", 1, rank=1), node("b", 2, rank=1))
    assert decide(State(nodes=twice), rules, 1e6) == Idle()
    both = {**twice, **seen(node("c", 3, rank=0))}
    assert names(decide(State(nodes=both), rules, 0.0)) == ["c", "a"]


def test_natural_order_and_topology() -> None:
    hosts = ["node10", "node2", "node1", "rack²"]
    assert sorted(hosts, key=natural) == ["node1", "node2", "node10", "rack²"]
    chosen = [node("n1", topology="rack2"), node("n2", topology="rack1"), node("n10", topology="rack1")]
    assert [seat.id for seat in assign_ranks(chosen, ())] == ["n2", "n10", "n1"]


def test_a_vacant_rank_goes_to_the_same_host_then_to_the_same_topology() -> None:
    previous = [MemberNode.of(node(n, topology=t)) for n, t in (("h1", "x"), ("h2", "y"), ("h3", "z"))]
    back = NodeRecord(id="new", ticket=9, host="h3", addr="", port=1, local_size=1, topology="q")
    alike = node("a0", topology="y")
    other = node("a1")
    assert [seat.id for seat in assign_ranks([other, alike, back], previous)] == ["a1", "a0", "new"]


@given(
    old=st.lists(st.integers(0, 12), unique=True, max_size=8),
    new=st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=10),
    limit=st.integers(1, 8),
)
def test_survivors_come_first_and_keep_their_ranks(old: list[int], new: list[int], limit: int) -> None:
    previous = [MemberNode.of(node(f"n{i}", i + 1)) for i in old]
    ready = [node(f"n{i}", i + 1) for i in new]
    chosen = choose(ready, previous, limit)
    seats = assign_ranks(chosen, previous)
    assert len(seats) == min(limit, len(new))
    assert {seat.id for seat in seats} == {record.id for record in chosen}
    survivors = [seat.id for seat in previous if seat.id in {record.id for record in ready}]
    assert set(survivors[:limit]) <= {seat.id for seat in seats}
    for rank, seat in enumerate(previous[: len(seats)]):
        if seat.id in {s.id for s in seats}:
            assert seats[rank].id == seat.id
