"""The pure parts of the end of a job: vacant ranks, going back, how a process ended; and of running it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.stores import MemoryStore
from phalanx.elastic import ResultLost, StepsLost
from phalanx.elastic.membership._committed_steps import CommittedSteps, check_setback
from phalanx.elastic.membership._final_state import FinalStateServer, StoreAccess
from phalanx.elastic.membership._finish import Vacant, find_vacant, parse_finish, prefer
from phalanx.elastic.membership._leave import has_ended_well
from phalanx.launch.rendezvous._runs import is_past
from phalanx.protocol import (
    SETBACKS,
    Closing,
    Finish,
    JobKeys,
    MemberNode,
    Members,
    Setbacks,
    ended_key,
    members_key,
)

pytestmark = pytest.mark.fast

names = st.sampled_from("abcdef")


@given(
    st.lists(names, min_size=1, max_size=6, unique=True),
    st.sets(names),
    st.sets(names),
    st.sampled_from(["h1", "h2"]),
)
def test_every_rank_is_ended_or_has_a_member_or_is_vacant(holders, ended, members, host):
    vacant = find_vacant(holders, ended, members)
    assert {v.rank for v in vacant} == {rank for rank, worker in enumerate(holders) if worker not in ended | members}
    hosts = ["h1", "h2", "h1", "h2", "h1", "h2"][: len(holders)]
    order = prefer(vacant, hosts, host)
    assert sorted(order, key=lambda v: v.rank) == vacant
    near = [hosts[v.rank] == host for v in order]
    assert near == sorted(near, reverse=True)


@pytest.mark.parametrize("data", [None, b"", b"\xff", b"7", b"[]", b'[1,2,3,"ab",[1]]', b"[1,2,null,[],[]]"])
def test_what_is_no_record_of_an_end_is_none(data):
    assert parse_finish(data) is None


def test_a_record_of_an_end_survives_the_store():
    finish = Finish(generation=3, round=1, step=60, workers=("a", "b"), hosts=("h", "h"))
    assert parse_finish(finish.to_json()) == finish
    assert find_vacant(finish.workers, (), ("b",)) == [Vacant(0, "a")]


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans())
def test_going_back_needs_saves_or_permission(before, after, has_saves, may_begin_again):
    if before > after and not has_saves and not may_begin_again:
        with pytest.raises(StepsLost, match=f"{before} committed steps"):
            check_setback(before, after, has_saves=False, may_begin_again=False)
    else:
        found = check_setback(before, after, has_saves=has_saves, may_begin_again=may_begin_again)
        assert found == (before > after)


def test_setbacks_are_said_and_counted(capsys):
    store = MemoryStore()
    committed_steps = CommittedSteps(store, JobKeys())
    assert committed_steps.note(57)
    assert not committed_steps.note(58), "it is written now and then only"
    assert committed_steps.num_committed() == 57
    committed_steps.go_back(57, 50)
    committed_steps.go_back(50, 0)
    assert Setbacks.from_json(store.get(SETBACKS)) == Setbacks(count=2, num_steps=57, last_from=50, last_to=0)
    assert committed_steps.num_committed() == 0
    said = capsys.readouterr().err.splitlines()
    assert "from step 57 to step 50, its newest save; 7 steps are computed again" in said[0]
    assert "from step 50 to step 0, its beginning; 50 steps are computed again" in said[1]
    store.set(JobKeys().committed, b"garbage")
    assert committed_steps.num_committed() == 0


def test_a_script_has_ended_well_only_with_code_0():
    assert has_ended_well({"PHALANX_EXIT_CODE": "0"})
    assert not has_ended_well({"PHALANX_EXIT_CODE": "3"})


@pytest.mark.parametrize(
    ("closing", "num_live", "now", "expected"),
    [
        (Closing(reason="", outcome="succeeded", time=100.0), 0, 200.0, True),
        (Closing(reason="", outcome="succeeded", time=100.0), 1, 200.0, False),
        (Closing(reason="", outcome="succeeded", time=100.0), 0, 110.0, False),
        (Closing(reason="", outcome="failed", time=100.0), 0, 101.0, True),
        (Closing(reason="", outcome="failed", time=100.0), 1, 101.0, False),
        (Closing(reason="closed by hand"), 0, 200.0, True),
    ],
)
def test_a_job_is_run_anew_when_the_last_run_is_over(closing, num_live, now, expected):
    assert is_past(closing, num_live, now=now, grace=30.0) is expected


@pytest.fixture
def contact() -> StoreAccess:
    root = MemoryStore()
    at = StoreAccess(
        store=root.clone(), root=root, keys=JobKeys(), job="j", worker_id="a", timeout=0.2, comm_timeout=5.0
    )
    members = Members(1, (MemberNode("n", 1, "h", "", 0, 1, worker_ids=("a",)),))
    at.store.set(members_key(1), members.to_json())
    return at


def test_a_rank_that_stays_vacant_ends_the_wait_of_the_others_with_an_error(contact):
    """Its node is gone, say, and no other comes: those who wait for its script must not end with code 0."""
    finish = Finish(generation=0, round=0, step=6, workers=("a", "b"))
    server = FinalStateServer(contact.clone(), finish, 0, 1, None)
    try:
        with pytest.raises(ResultLost, match=r"rank 1 \(worker b\) was lost after the last step"):
            server.stay(100.0)
        assert contact.store.get(ended_key("a")) is None, "its own end is to count as a failure"
    finally:
        server.stop()


def test_who_has_waited_long_enough_for_a_script_says_so_and_goes(contact, capsys):
    contact.store.set(members_key(1), b"{garbage")
    finish = Finish(generation=0, round=0, step=6, workers=("a", "b"))
    server = FinalStateServer(contact.clone(), finish, 0, 0, None)
    try:
        server.stay(0.05)
        assert "has waited 0.05 s for the scripts of ranks [1] to end" in capsys.readouterr().err
        assert contact.store.get(ended_key("a")) is not None
        contact.store.set(ended_key("b"), b"1")
        server.stay(100.0)
        assert server._thread.is_alive(), "a record that is none must not end it"
    finally:
        server.stop()


def test_what_others_need_until_the_end_is_written_again_when_it_is_gone(contact):
    """By a worker that came for one that was lost, and whose script has ended: all that a stranger may write over."""
    keys = JobKeys()
    finish = Finish(generation=0, round=0, step=6, workers=("c", "b"))
    server = FinalStateServer(contact.clone(), finish, 0, 1, None)
    try:
        server.stay(0.01)
        lasting = [keys.done, keys.keeps(1, "a"), keys.claim(0, 0), ended_key("a")]
        before = contact.store.wait(lasting, 100)
        for key in lasting:
            contact.store.delete(key)
        assert contact.store.wait(lasting, 100) == before
    finally:
        server.stop()
