"""Who gets a place: pure decisions, also under random declarations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.failure._identities import identity_record, pack_identities
from phalanx.comm.failure._liveness import Identity
from phalanx.elastic.membership._round_processes import declared_identities, processes_of, with_processes
from phalanx.elastic.membership._rounds import choose_round, choose_source
from phalanx.protocol import FRESH, Ready, Round

pytestmark = pytest.mark.fast

ABC = ("a", "b", "c")


def test_at_the_beginning_all_members_are_waited_for():
    assert choose_round(ABC, {"a": Ready(), "c": Ready()}) is None
    assert choose_round(ABC, dict.fromkeys(ABC, Ready())) == Round(ABC)


def test_survivors_wait_for_each_other_but_not_for_replacements():
    peers = ("a", "b", "x")
    one = {"b": Ready(step=4, peers=peers)}
    assert choose_round(ABC, one) is None, "a survived too and will come"
    both = {**one, "a": Ready(step=5, peers=peers)}
    assert choose_round(ABC, both) == Round(("a", "b"))
    assert choose_round(ABC, {**both, "c": Ready()}) == Round(ABC), "c is ready by chance"


def test_a_known_worker_that_is_no_member_any_more_is_not_waited_for():
    assert choose_round(("b",), {"b": Ready(step=4, peers=ABC)}) == Round(("b",))


def test_while_some_evaluate_only_they_and_who_will_come_to_that_evaluation_get_a_seat():
    ready = {
        "a": Ready(step=4, peers=ABC),
        "b": Ready(step=5, evaluating=True, peers=ABC),
        "c": Ready(step=5, evaluating=True, peers=ABC),
    }
    assert choose_round(ABC, ready) == Round(ABC), "a takes step 4 over, then its loop evaluates"
    for other in (Ready(), Ready(step=3, peers=ABC), Ready(step=5, peers=ABC)):
        assert choose_round(ABC, {**ready, "a": other}) == Round(("b", "c"))


def test_who_was_cut_off_from_a_completed_evaluation_gets_a_seat_with_those_who_completed_it():
    ready = {"a": Ready(step=5, evaluations=1, peers=ABC), "b": Ready(step=5, evaluating=True, peers=ABC)}
    assert choose_round(("a", "b"), ready) == Round(("a", "b"))


def test_the_most_advanced_state_counts_and_the_lowest_rank_among_equals():
    assert choose_source([3, 4, 4]) == 1
    assert choose_source([FRESH, 0]) == 1
    assert choose_source([FRESH] * 3) == 0


ready_records = st.just(Ready()) | st.builds(
    Ready,
    step=st.sampled_from([3, 4]),
    evaluations=st.integers(0, 1),
    evaluating=st.booleans(),
    peers=st.sets(st.sampled_from("abcde")).map(tuple),
)


@given(members=st.lists(st.sampled_from("abcde"), min_size=1, unique=True), data=st.data())
def test_a_choice_never_leaves_out_the_most_advanced(members, data):
    ready = {worker: data.draw(ready_records) for worker in data.draw(st.sets(st.sampled_from(members)))}
    found = choose_round(members, ready)
    if found is None:
        return
    assert list(found.workers) == [worker for worker in members if worker in found.workers]
    best = max(ready[worker].position for worker in ready)
    assert any(ready[worker].position == best for worker in found.workers)
    assert all(worker in ready for worker in found.workers)


def test_records_survive_json():
    ready = Ready(step=3, evaluations=1, evaluating=True, peers=("a", "b"))
    assert Ready.from_json(ready.to_json()) == ready
    for record in (Round(("a",)), Round(move_to=4)):
        assert Round.from_json(record.to_json()) == record


def test_who_the_workers_are_is_in_the_round_if_all_have_said_it_and_it_can_be_read():
    known = {name: Identity(machine="boot", host=name, pid=pid, started=1, uid=0) for pid, name in enumerate("ab", 2)}
    ready = {name: Ready(process=identity_record(one)) for name, one in known.items()}
    record = with_processes(Round(("b", "a")), declared_identities(ready))
    assert processes_of(Round.from_json(record.to_json())) == {0: known["b"], 1: known["a"]}
    for process in ({}, {"v": 2}, {"v": 1, "pid": "x"}):
        lacking = declared_identities({**ready, "a": Ready(process=process)})
        assert lacking == {"b": known["b"]}
        assert processes_of(with_processes(Round(("b", "a")), lacking)) is None, "all have to ask"
    for garbage in ("", "x", "!", pack_identities([known["a"]]).decode()):
        assert processes_of(Round(("b", "a"), processes=garbage)) is None
