"""Which nodes run a member of a job's own etcd: the rules, one by one and under many losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.launch.rendezvous._etcd_members import (
    EtcdMember,
    MemberChange,
    Offer,
    acting_node,
    initial_cluster,
    next_change,
    read_members,
    wanted_voters,
)

pytestmark = pytest.mark.fast


def offers(names: str) -> list[Offer]:
    return [Offer(node=name, peer=f"https://{name}:2", client=f"https://{name}:1") for name in names]


def voters(names: str) -> list[EtcdMember]:
    return [
        EtcdMember(id=f"id{name}", node=name, peer=f"https://{name}:2", client=f"https://{name}:1") for name in names
    ]


def test_a_cluster_grows_when_three_nodes_are_there_one_learner_at_a_time():
    assert next_change(voters("a"), offers("a"), 3) is None
    assert next_change(voters("a"), offers("ab"), 3) is None, "of two members either's loss would end the store"
    change = next_change(voters("a"), offers("abc"), 3)
    assert change is not None
    assert change.add == offers("b")[0]
    learner = replace(voters("b")[0], is_learner=True, node="")
    change = next_change([*voters("a"), learner], offers("abc"), 3)
    assert change == MemberChange(promote=learner)
    change = next_change(voters("ab"), offers("abc"), 3)
    assert change is not None
    assert change.add == offers("c")[0]
    assert next_change(voters("abc"), offers("abcd"), 3) is None


def test_a_lost_member_is_taken_out_and_replaced_on_another_node():
    change = next_change(voters("abc"), offers("bcd"), 3)
    assert change is not None
    assert change.remove == voters("a")[0]
    change = next_change(voters("bc"), offers("bcd"), 3)
    assert change is not None
    assert change.add == offers("d")[0]


def test_without_another_node_two_members_become_one():
    change = next_change(voters("abc"), offers("bc"), 3)
    assert change is not None
    assert change.remove == voters("a")[0]
    change = next_change(voters("bc"), offers("bc"), 3)
    assert change is not None
    assert change.remove == voters("c")[0], "the one that came last"
    assert next_change(voters("b"), offers("bc"), 3) is None


def test_without_a_majority_nothing_is_changed():
    assert next_change(voters("abc"), offers("cd"), 3) is None


def test_a_member_whose_node_leaves_votes_for_its_own_removal():
    assert next_change(voters("ab"), offers("a"), 3) is None, "b is silent: there is no majority to take it out"
    change = next_change(voters("ab"), offers("a"), 3, leaving={"b"})
    assert change is not None
    assert (change.remove, change.why) == (voters("b")[0], "its node leaves")
    change = next_change(voters("abc"), offers("a"), 3, leaving={"b"})
    assert change is not None
    assert change.remove == voters("c")[0], "the silent one first"
    assert next_change(voters("abcde"), offers("a"), 5, leaving={"b"}) is None, "two votes of five"


def test_a_learner_that_is_lost_or_cannot_start_is_taken_out():
    learner = replace(voters("b")[0], is_learner=True, node="")
    change = next_change([*voters("a"), learner], offers("ac"), 3)
    assert change is not None
    assert change.remove == learner
    change = next_change([*voters("a"), learner], offers("abcd"), 3, unfit={"b"})
    assert change is not None
    assert change.remove == learner
    change = next_change(voters("a"), offers("abcd"), 3, unfit={"b"})
    assert change is not None
    assert change.add == offers("c")[0]


def test_the_first_living_voter_acts():
    assert acting_node(voters("abc"), offers("cba")) == "c", "in the order in which they came"
    assert acting_node([*voters("b"), replace(voters("a")[0], is_learner=True)], offers("ab")) == "b"
    assert acting_node(voters("a"), offers("b")) == ""


def test_members_are_read_as_etcd_lists_them():
    told = {
        "members": [
            {"ID": "17", "name": "a", "peerURLs": ["https://a:2"], "clientURLs": ["https://a:1"]},
            {"ID": "18", "peerURLs": ["https://b:2"], "isLearner": True},
        ]
    }
    found = read_members(told)
    assert found == [
        replace(voters("a")[0], id="17"),
        EtcdMember(id="18", node="", peer="https://b:2", is_learner=True),
    ]
    assert initial_cluster(found, offers("b")[0]) == "a=https://a:2,b=https://b:2"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from("+-lcps"), max_size=60), st.sampled_from([1, 3, 5]), st.randoms(use_true_random=False))
def test_no_change_ever_costs_the_majority(happenings, size, chance):
    """Nodes come (+), are lost (-) and leave (l), at most so many lost between two changes (the rest) as the cluster is
    made to survive; one that leaves votes until its member is taken out."""
    living, members, leaving, count = offers("0"), voters("0"), set(), 1

    def num_voting() -> tuple[int, int]:
        votes = [member for member in members if not member.is_learner]
        alive = {offer.peer for offer in living}
        return sum(vote.peer in alive or vote.node in leaving for vote in votes), len(votes)

    def change_once() -> MemberChange | None:
        change = next_change(members, living, size, leaving=leaving)
        if change is None:
            return None
        if change.add is not None:
            members.append(EtcdMember(id=f"m{len(members)}", node="", peer=change.add.peer, is_learner=True))
        elif change.promote is not None:
            name = next(offer.node for offer in living if offer.peer == change.promote.peer)
            members[members.index(change.promote)] = replace(change.promote, is_learner=False, node=name)
        elif change.remove is not None:
            members.remove(change.remove)
        return change

    for happening in happenings:
        if happening == "+":
            living.append(Offer(node=str(count), peer=f"https://{count}:2", client=""))
            count += 1
            continue
        if happening in "-l":
            gone = chance.choice(living)
            num_alive, num_votes = num_voting()
            is_voter = any(member.peer == gone.peer and not member.is_learner for member in members)
            if len(living) == 1 or (happening == "-" and is_voter and num_alive - 1 <= num_votes // 2):
                continue  # more than it is made for
            if not any(offer.peer == each.peer for offer in living if offer is not gone for each in members):
                continue  # nobody with a vote would stay: that one stays itself, until the others are done
            living.remove(gone)
            if happening == "l":
                leaving.add(gone.node)
            continue
        change = change_once()
        num_alive, num_votes = num_voting()
        assert num_alive > num_votes // 2, (change, members, living)
        assert len(members) - num_votes <= 1, "etcd takes one learner at a time"
    for _ in range(60):  # and it comes to rest as it should be
        if change_once() is None:
            break
    else:
        pytest.fail(f"no rest: {members}, {living}")
    assert len(members) == wanted_voters(len(living), size)
    assert {member.peer for member in members} <= {offer.peer for offer in living}
