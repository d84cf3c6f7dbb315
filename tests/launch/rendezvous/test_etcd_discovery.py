"""The endpoints of a job's own etcd, on real TCP stores without any etcd: who finds what there, and who gives up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from phalanx.comm import stores
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous import _etcd_discovery
from phalanx.launch.rendezvous._etcd_discovery import DiscoveryBoard, Herald
from phalanx.launch.rendezvous._interface import RendezvousConnectionError
from phalanx.protocol import ETCD_ENDPOINT, PRESENT, ClusterRecord

pytestmark = pytest.mark.timeout(120)

LIVES = ClusterRecord(founder="b", began=1.0, members=("b:1", "c:1"))
OFFER = ClusterRecord(founder="a", began=2.0, members=("a:1",))


class Street:
    """Boards of several nodes with one endpoint."""

    def __init__(self, parts: ExitStack) -> None:
        self._parts = parts
        self.endpoint: tuple[str, int] = ("127.0.0.1", 0)

    def serve_endpoint(self, secret: bytes = b"secret") -> DiscoveryBoard:
        server = stores.TCPStore.serve(*self.endpoint)
        self.endpoint = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        server.set(ETCD_ENDPOINT, PRESENT)
        board = self.board("a", secret)
        board.serve(server)
        return board

    def keep(self, store: stores.TCPStore) -> None:
        self._parts.callback(store.close)

    def board(self, node: str, secret: bytes = b"secret") -> DiscoveryBoard:
        board = DiscoveryBoard([self.endpoint], Signer("job7", secret), node)
        self._parts.callback(board.close)
        return board

    def herald(self, record: ClusterRecord, *, answers: bool = True) -> tuple[Herald, threading.Event]:
        given_up = threading.Event()
        herald = Herald(
            self.board(record.founder), lambda: (record, False), answers=lambda _: answers,
            give_up=lambda elder: given_up.set(),
        )  # fmt: skip
        self._parts.callback(herald.close)
        herald.start()
        return herald, given_up


@pytest.fixture
def street(monkeypatch: pytest.MonkeyPatch) -> Iterator[Street]:
    monkeypatch.setattr(_etcd_discovery, "GRACE", 0.0)
    monkeypatch.setattr(_etcd_discovery, "TELL", 0.05)
    with ExitStack() as parts:
        yield Street(parts)


def test_a_first_node_that_returns_waits_until_it_is_told_and_begins_nothing(street):
    """Its grace is over at once, and still it begins no second cluster."""
    board = street.serve_endpoint()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(board.wait_as_first, OFFER, min_nodes=2, timeout=60.0)
        with pytest.raises(TimeoutError):
            found.result(0.5)
        street.herald(LIVES)
        assert found.result(60.0) == LIVES


def test_as_many_as_the_job_needs_begin_it_and_all_find_the_same(street):
    first = street.serve_endpoint()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(street.board(node).wait_anywhere, reach=60.0, timeout=60.0) for node in "bc"]
        assert first.wait_as_first(OFFER, min_nodes=3, timeout=60.0) is OFFER
        assert {other.result(60.0) for other in others} == {OFFER}


def test_a_stranger_is_not_counted_and_what_it_writes_is_no_record(street):
    first = street.serve_endpoint()
    stranger = street.board("x", b"another")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stranger.wait_anywhere, reach=0.5, timeout=1.0)
        with pytest.raises(RendezvousConnectionError, match=r"the 2 nodes with which the job's etcd begins.*; 1 came"):
            first.wait_as_first(OFFER, min_nodes=2, timeout=1.0)
        with pytest.raises(RendezvousConnectionError, match="which nobody has begun"):
            waiting.result(60.0)
    stranger.tell(LIVES, acts=True, answers=lambda _: True)
    assert first.wait_as_first(OFFER, min_nodes=1, timeout=60.0) is OFFER


def test_a_node_with_another_secret_does_not_wait_long(street):
    street.serve_endpoint()
    street.board("b").tell(LIVES, acts=True, answers=lambda _: True)
    with pytest.raises(RendezvousConnectionError, match=r"has said within 0.3 s.* and the same secret"):
        street.board("x", b"another").wait_anywhere(reach=0.3, timeout=3600.0)


def test_an_endpoint_that_is_served_anew_is_told_again(street):
    board = street.serve_endpoint()
    street.herald(LIVES)
    assert board.wait_as_first(OFFER, min_nodes=2, timeout=60.0) == LIVES
    board.close()
    assert street.serve_endpoint().wait_as_first(OFFER, min_nodes=2, timeout=60.0) == LIVES


def test_what_is_forgotten_is_told_again_by_who_lives(street):
    board = street.serve_endpoint()
    herald, _ = street.herald(LIVES)
    assert board.wait_as_first(OFFER, min_nodes=2, timeout=60.0) == LIVES
    board.forget(LIVES)
    assert board.wait_as_first(OFFER, min_nodes=2, timeout=60.0) == LIVES
    herald.close()
    board.forget(LIVES)
    assert board.wait_as_first(OFFER, min_nodes=1, timeout=60.0) is OFFER, "nobody lives any more"


def test_the_younger_of_two_clusters_is_given_up_and_the_elder_stays(street):
    street.serve_endpoint()
    _, elder_gave_up = street.herald(LIVES)
    _, gave_up = street.herald(OFFER)
    assert gave_up.wait(60.0)
    assert not elder_gave_up.is_set()
    assert street.board("d").wait_anywhere(reach=60.0, timeout=60.0) == LIVES


def test_a_record_of_a_dead_cluster_takes_nobodys_place(street):
    street.serve_endpoint()
    street.board("b").tell(LIVES, acts=True, answers=lambda _: True)
    board = street.board("a2")
    assert board.tell(OFFER, acts=False, answers=lambda _: False) is None
    assert board.wait_anywhere(reach=60.0, timeout=60.0) == OFFER


def test_only_the_acting_member_changes_what_its_cluster_says(street):
    street.serve_endpoint()
    board = street.board("b")
    changed = replace(LIVES, members=("c:1", "d:1"))
    for record, acts, seen in ((LIVES, False, LIVES), (changed, False, LIVES), (changed, True, changed)):
        assert board.tell(record, acts=acts, answers=lambda _: True) is None
        assert board.wait_anywhere(reach=60.0, timeout=60.0) == seen


@pytest.mark.parametrize("is_served", [False, True])
def test_a_machine_without_an_endpoint_is_named(street, is_served):
    """One where nobody listens, or an agent without an etcd of its own."""
    street.serve_endpoint().close()
    if is_served:
        street.keep(stores.TCPStore.serve(*street.endpoint))
    with pytest.raises(RendezvousConnectionError, match=r"nobody at 127.0.0.1:\d+ has said within 0.3 s"):
        street.board("b").wait_anywhere(reach=0.3, timeout=60.0)
