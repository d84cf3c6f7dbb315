"""Who is to blame when workers lose contact: decisions over what they wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.recovery._contact import MAX_UNNAMED, judge, most_named
from phalanx.launch.recovery._policy import Action, Situation, on_lost_contact
from phalanx.protocol import ContactLosses, LostContact, RecordError

pytestmark = pytest.mark.fast
MEMBERS = ("a", "b", "c", "d")


def word(by: str, *of: str, late: bool = False, step: int = 7, peers: tuple[str, ...] = MEMBERS) -> LostContact:
    return LostContact(by=by, of=of, late=late, peers=peers, step=step, reason="it said so")


def test_the_first_time_nobody_is_replaced_and_a_step_in_between_makes_it_the_first_time_again():
    words = [word(each, "c") for each in "abd"] + [word("c", "a")]
    first = judge(words, MEMBERS)
    assert (first.replace, first.row) == ((), ContactLosses(count=1, step=7))
    assert judge(words, MEMBERS, before=first.row).replace == ("c",)
    later = [word(each, "c", step=8) for each in "abd"] + [word("c", "a", step=8)]
    assert judge(later, MEMBERS, before=first.row).replace == ()


def test_a_stopped_worker_is_replaced_at_once_whatever_the_others_say():
    assert judge([word("a", "c")], MEMBERS, stopped=["b"]).replace == ("b",)


def test_who_was_waited_for_and_says_nothing_is_replaced_but_not_who_has_no_seat():
    assert judge([word("a", late=True), word("b"), word("d")], MEMBERS).replace == ("c",)
    assert judge([word("a", late=True, peers=("a", "b")), word("b", peers=("a", "b"))], MEMBERS).replace == ()
    assert judge([word("a"), word("b")], MEMBERS).replace == (), "they may compute, and hear of it later"


def test_of_a_lone_pair_the_later_rank_is_replaced_and_a_third_word_decides_otherwise():
    pair = [word("b", "c"), word("c", "b")]
    assert most_named(pair, MEMBERS) == "c"
    assert most_named([*pair, word("a", "b")], MEMBERS) == "b"
    assert most_named([word("b", "b")], MEMBERS) is None, "nobody is out of its own reach"


def test_without_a_name_all_regroup_a_stated_number_of_times_and_then_the_job_fails():
    row, actions = None, []
    now = Situation(heals=True, restarts=0, max_restarts=9, num_nodes=1, min_nodes=1, survivors=4)
    for _ in range(MAX_UNNAMED + 1):
        judgement = judge([word(each) for each in MEMBERS], MEMBERS, before=row)
        row = judgement.row
        actions.append(on_lost_contact(now, judgement, False).action)
    assert actions == [Action.REGROUP] * MAX_UNNAMED + [Action.FAIL]


def test_who_alone_cannot_say_whom_it_lost_several_times_in_a_row_is_replaced():
    """A host without a network notices at once that it reaches nobody; the others wait for it."""
    row, replaced = None, []
    for speakers in ("b", "b", "b"):
        judgement = judge([word(each) for each in speakers], MEMBERS, before=row)
        row = judgement.row
        replaced.append(judgement.replace)
    assert replaced == [(), (), ("b",)]
    assert row == ContactLosses(step=7), "whoever comes in its place begins anew"
    for spoken in (("b", "c", "b"), ("b", "bc", "b"), ("bc", "b", "b")):
        row = None
        for speakers in spoken:
            judgement = judge([word(each) for each in speakers], MEMBERS, before=row)
            row = judgement.row
            assert judgement.replace == (), spoken


def test_a_replacement_counts_as_a_restart_and_without_restarts_the_job_goes_on_with_fewer():
    judgement = judge([word("a", late=True)], ("a", "b"))
    for max_restarts, action, restarts in ((1, Action.HEAL, 1), (0, Action.SHRINK, 0)):
        now = Situation(heals=True, restarts=0, max_restarts=max_restarts, num_nodes=1, min_nodes=1, survivors=2)
        recovery = on_lost_contact(now, judgement, True)
        assert (recovery.action, recovery.restarts, recovery.replace) == (action, restarts, ("b",))


@given(
    st.lists(st.builds(word, st.sampled_from("abcdx"), st.sampled_from("abcdx"), late=st.booleans())),
    st.sets(st.sampled_from("abcdx")),
    st.none() | st.builds(ContactLosses, count=st.integers(0, 9), step=st.integers(-1, 9)),
)
def test_only_members_are_ever_replaced_and_never_all_that_spoke(words, stopped, before):
    judgement = judge(words, MEMBERS, before=before, stopped=stopped)
    assert set(judgement.replace) <= set(MEMBERS)
    if not stopped:
        speakers = {each.by for each in words if each.by in MEMBERS}
        assert not speakers or speakers - set(judgement.replace) or len(speakers) == 1


def test_a_record_survives_its_journey_and_garbage_is_refused():
    assert LostContact.from_json(word("a", "b", late=True).to_json()) == word("a", "b", late=True)
    good = json.loads(word("a", "b").to_json())
    bad = [b"", b"\xff", b"[" * 100_000, b"7", json.dumps({**good, "of": "b"}).encode()]
    bad += [json.dumps({**good, key: {}}).encode() for key in good]
    bad += [json.dumps({k: v for k, v in good.items() if k != key}).encode() for key in ("v", "of", "peers", "by")]
    for data in bad:
        with pytest.raises(RecordError):
            LostContact.from_json(data)
