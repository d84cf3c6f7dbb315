"""Handlers on real stores: all backends pass the same suite; then what is particular to some."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.comm.stores.conftest import etcd_cluster, wait_until

from phalanx import protocol
from phalanx.comm.stores import MemoryStore, TCPStore
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import Signer
from phalanx.launch.recovery._agent_channel import AgentChannel
from phalanx.launch.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from phalanx.launch.rendezvous._backends import open_tcp
from phalanx.launch.rendezvous._decide import Rules
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._participant import Participant
from phalanx.launch.rendezvous._store_records import ring
from phalanx.launch.rendezvous._waiting import waiting_line
from phalanx.protocol import (
    Action,
    Broken,
    Closing,
    FailureReport,
    Members,
    NodeRecord,
    ProgressReport,
    Recovery,
    Setbacks,
    bell_key,
    broken_key,
    failures_prefix,
    leaving_key,
    members_key,
    progress_key,
    recovery_key,
    stacks_key,
    wanted_key,
    wish_key,
)

JOIN = 100  # generous: the machine may be busy
LEASE = 120  # nobody loses it because the machine stalls; ``shorten_lease`` is for those who shall

pytestmark = pytest.mark.timeout(400)


class Job:
    """The handlers of one test; all are shut down at its end."""

    def __init__(self, backend: str, endpoint: str) -> None:
        self.backend, self.endpoint = backend, endpoint
        self.run_id = uuid.uuid4().hex[:8]
        self.handlers: list[StoreRendezvousHandler] = []

    def node(self, min_nodes: int, max_nodes: int, workers: int = 1, **config: object) -> StoreRendezvousHandler:
        settings = {
            "join_timeout": JOIN,
            "lease": LEASE,
            "last_call_timeout": JOIN,
            "admit_delay": 0,
            **config,
        }
        params = RendezvousParameters(self.backend, self.endpoint, self.run_id, min_nodes, max_nodes, None, **settings)
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, StoreRendezvousHandler)
        handler.set_local_size(workers)
        self.handlers.append(handler)
        if self.endpoint.endswith(":0"):
            self.endpoint = handler.store_url.removeprefix("tcp://")
        return handler

    def close(self) -> None:
        for handler in reversed(self.handlers):  # the first one may serve the store
            handler.shutdown()


def shorten_lease(handler: StoreRendezvousHandler) -> None:
    """Its record, unchanged, hangs on a lease that runs out by itself in a moment unless it is refreshed."""
    participant = handler._participant
    participant._lease = participant.store.lease(1.0)
    participant._write_node()


def look_often(*handlers: StoreRendezvousHandler) -> None:
    """They look round as often as on a short lease, on the long one that they have."""
    for handler in handlers:
        with handler._changed:
            handler._participant._ttl = 4.0
        ring(handler._store, handler._signer)  # the next look is due by the old interval: this one sets the new


def vanish(handler: StoreRendezvousHandler) -> None:
    """As if its machine had been cut off: nothing is refreshed or said any more."""
    stop_thread(handler)
    shorten_lease(handler)


def stop_thread(handler: StoreRendezvousHandler) -> None:
    with handler._changed:
        handler._stopping = True
    ring(handler._store, handler._signer)  # a leader waits for news, which nobody else may have for a long time
    handler._participant.interrupt()
    assert handler._thread is not None
    handler._thread.join()
    handler._stopping = False  # so that the end of the test can still close what it opened


def meet(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers))


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd_cluster(1, tmp_path_factory.mktemp("etcd")) as (server,):
        yield server.url.removeprefix("etcd://")


@pytest.fixture(params=["c10d", "file", "etcd"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    endpoints: dict[str, Callable[[], str]] = {
        "c10d": lambda: "localhost:0",
        "file": lambda: str(tmp_path / "rdzv"),
        "etcd": lambda: str(request.getfixturevalue("etcd_endpoint")),
    }
    job = Job(request.param, endpoints[request.param]())
    yield job
    job.close()


@pytest.fixture
def c10d() -> Iterator[Job]:
    job = Job("c10d", "localhost:0")
    yield job
    job.close()


@pytest.fixture
def static(held_port: int) -> Iterator[Job]:
    job = Job("static", f"localhost:{held_port}")
    yield job
    job.close()


# -- every backend --


def test_nodes_agree_on_ranks_and_workers_find_their_members(job: Job) -> None:
    handlers = [job.node(3, 3, workers=1 + i) for i in range(3)]
    infos = meet(*handlers)
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert len({info.nodes for info in infos}) == 1
    assert {(info.world_size, info.generation, info.num_workers) for info in infos} == {(3, 0, 6)}
    assert len({info.bootstrap_store_info for info in infos}) == 1
    assert infos[0].bootstrap_store_info.master_port > 0
    for info, size in zip(infos, (1, 2, 3), strict=True):
        assert info.node.local_size == size
        members = Members.from_json(info.store.get(members_key(0)) or b"")
        assert members == info.members()
        made = replace(info, agreed=None).members()  # as a handler of another package would say it
        assert made.workers == members.workers
        where = info.bootstrap_store_info
        assert (members.master_addr, members.master_port) == (where.master_addr, where.master_port)
        assert [worker.rank for worker in members.workers] == list(range(6))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server listen on a port that is held")
def test_the_port_offered_for_the_workers_store_stays_this_nodes_own(c10d: Job) -> None:
    handler = c10d.node(1, 1)
    (info,) = meet(handler)
    port = info.bootstrap_store_info.master_port
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    for host in ("127.0.0.1", "0.0.0.0"):
        store = TCPStore.serve(host, port)
        store.set("key", b"value")
        assert store.get("key") == b"value"
        store.close()
    held = handler._held
    assert held is not None
    handler.shutdown()
    assert held.fileno() == -1, "given back"


def test_a_broken_generation_ends_for_all_and_survivors_keep_their_ranks(job: Job) -> None:
    handlers = [job.node(3, 3) for _ in range(3)]
    before = meet(*handlers)
    watches = [handler.watch_generation(0) for handler in handlers]
    assert all(watch.wait(0) is None for watch in watches)
    handlers[1].break_generation(0, Broken(reason="worker w died", workers=("w",)))
    handlers[2].break_generation(0, Broken(reason="too late"))
    for watch in watches:
        end = watch.wait(JOIN)
        assert end is not None
        assert (end.kind, end.reason) == ("broken", "worker w died")
        assert end.broken == Broken(reason="worker w died", workers=("w",))
    assert Broken.from_json(before[0].store.get(broken_key(0)) or b"").workers == ("w",)
    after = meet(*handlers)
    assert [info.rank for info in after] == [info.rank for info in before]
    assert {info.generation for info in after} == {1}


def test_a_leader_that_joins_again_does_not_wait_for_its_own_watch(c10d: Job) -> None:
    handler = c10d.node(1, 1)
    meet(handler)
    may_look, looked = threading.Event(), []
    with handler._changed:
        handler._participant.pause = lambda timeout: looked.append(may_look.wait(JOIN))  # type: ignore[method-assign]
    ring(handler._store, handler._signer)  # its thread comes out of the pause before
    handler.break_generation(0, Broken(reason="worker w died", workers=("w",)))
    (after,) = meet(handler)
    assert after.generation == 1
    assert looked == [], "its thread has seen nothing yet"
    may_look.set()


def test_late_joiners_are_admitted_at_the_next_generation(job: Job) -> None:
    first, second = job.node(1, 2, last_call_timeout=0), job.node(1, 2)
    before = first.next_rendezvous()
    assert before.world_size == 1
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.next_rendezvous)
        end = first.watch_generation(0).wait(JOIN)
        assert end is not None
        assert end.kind == "wanted"
        assert before.store.get(wanted_key(0)) is not None
        after = first.next_rendezvous()
        assert (after.rank, after.world_size, after.generation) == (0, 2, 1)
        assert late.result(JOIN).rank == 1


def test_a_node_that_vanishes_loses_its_lease_and_the_others_go_on(job: Job) -> None:
    handlers = [job.node(1, 3) for _ in range(3)]
    infos = meet(*handlers)
    gone = handlers[infos[1].rank]
    stay = [handler for handler in handlers if handler is not gone]
    look_often(*stay)
    vanish(gone)
    for handler in stay:
        end = handler.watch_generation(0).wait(JOIN)
        assert end is not None
        assert end.kind == "broken"
        assert gone.node_id in end.reason
    after = meet(*stay)
    assert {(info.world_size, info.generation) for info in after} == {(2, 1)}
    assert gone.node_id not in {node.id for node in after[0].nodes}


def test_the_leader_may_vanish_too(job: Job) -> None:
    handlers = [job.node(1, 2) for _ in range(2)]
    meet(*handlers)
    (leader,) = (handler for handler in handlers if handler._participant._leading is not None)
    (other,) = (handler for handler in handlers if handler is not leader)
    look_often(other)
    vanish(leader)
    end = other.watch_generation(0).wait(JOIN)
    assert end is not None
    assert leader.node_id in end.reason
    assert other.next_rendezvous().world_size == 1


def test_closing_sends_spares_away_and_lets_nobody_in(job: Job) -> None:
    member, spare = job.node(1, 1), job.node(1, 1)
    member.next_rendezvous()
    watch = member.watch_generation(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(spare.next_rendezvous)  # when it comes, a generation has formed without it
        wait_until(lambda: len(member._store.items(protocol.NODES)) == 2)
        assert member.num_nodes_waiting() == 0
        member.break_generation(0, Broken(reason="once more"))
        assert member.next_rendezvous().generation == 1
        assert not member.is_closed()
        member.set_closed()
        with pytest.raises(RendezvousGracefulExitError, match="was a spare and not needed"):
            waiting.result(JOIN)
    assert spare.is_closed()
    end = watch.wait(JOIN)
    assert end is not None
    with pytest.raises(RendezvousClosedError):
        job.node(1, 1).next_rendezvous()


def test_a_node_that_waits_for_news_is_shut_down_at_once(job: Job) -> None:
    handlers = [job.node(1, 2) for _ in range(2)]
    meet(*handlers)
    for handler in reversed(handlers):  # the first one may serve the store
        assert handler.shutdown()
        assert handler._thread is not None
        assert not handler._thread.is_alive(), f"the thread of a {job.backend} handler waits on"


@pytest.mark.parametrize(("num_nodes", "pauses"), [(64, []), (1000, [0.25, 0.25, 0.25])])
def test_nodes_of_a_large_job_ask_a_store_that_cannot_push_a_few_times_a_second(num_nodes, pauses, monkeypatch):
    """A thousand that ask fifty times a second each are more than one server can answer."""
    monkeypatch.setattr(MemoryStore, "pushes", False)
    store = MemoryStore()
    record = NodeRecord(id="a", ticket=0, host="a", addr="a", port=1, local_size=1)
    rules = Rules(min_nodes=num_nodes, max_nodes=num_nodes)
    participant = Participant(store, Signer("large"), rules, record, lease=15.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            store.set(bell_key(1), b"1")

    monkeypatch.setattr(participant._interrupted, "wait", sleep)
    if not pauses:
        store.set(bell_key(1), b"1")
    participant.pause(60.0)
    assert slept == pauses
    assert participant._rung


def test_who_joins_after_the_shutdown_is_refused_and_holds_no_port(job: Job) -> None:
    handler = job.node(1, 1)
    handler.next_rendezvous()
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError, match="was shut down"):
        handler.next_rendezvous()
    assert handler._held is None


def test_too_few_nodes_is_a_timeout_that_says_who_is_there(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    handler = job.node(2, 2, join_timeout=2)
    with pytest.raises(RendezvousTimeoutError, match=r"1 node\(s\) are there, at least 2 are needed"):
        handler.next_rendezvous()
    assert handler.shutdown()
    (line,) = [text for text in caplog.messages if text.startswith("waiting for 1 more node at ")]
    assert f"(1 of 2 there: {handler.node_id}); start there: phalanx run --nnodes 2 " in line


# -- particular to one backend --


def test_what_a_waiting_node_says() -> None:
    many, two = Rules(min_nodes=3, max_nodes=4, last_call=30), Rules(min_nodes=2, max_nodes=2)
    line = waiting_line("c10d", "tcp://node0:29400", "job7", many, present=["node0_1"])
    assert line == (
        "waiting for 2 more nodes at node0:29400 (1 of 3 there: node0_1); start there: phalanx run --nnodes 3:4 "
        "--rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 ..."
    )
    line = waiting_line("static", "tcp://127.0.0.1:29500", "none", two, present=["me"], fixed_rank=0)
    assert line == (
        "waiting for 1 more node at 127.0.0.1:29500 (1 of 2 there: me); start there: phalanx run --nnodes 2 "
        "--node-rank 1 --master-addr 127.0.0.1 --master-port 29500 ... (only this machine reaches 127.0.0.1: with "
        "other machines give --master-addr an address that they reach)"
    )
    assert "begins 30 s after" in waiting_line("etcd", "etcd://e:1", "j", many, present=["a", "b", "c"])
    assert "is a spare" in waiting_line("file", "file:///d", "j", two, present=["a", "b", "c"], is_spare=True)
    assert "still stop" in waiting_line("file", "file:///d", "j", two, present=["a", "b"], is_first=False)


def test_a_node_that_finds_no_store_says_where_it_looks(held_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RendezvousConnectionError, match="cannot reach the rendezvous"):
        open_tcp("127.0.0.1", held_port, serve=False, timeout=2.0)
    assert f"waiting up to 2 s for the agent that serves the rendezvous at 127.0.0.1:{held_port}" in caplog.text


def test_nodes_that_left_are_not_waited_for(c10d: Job) -> None:
    first, second = c10d.node(1, 2), c10d.node(1, 2)
    meet(first, second)
    assert second.shutdown()
    end = first.watch_generation(0).wait(JOIN)
    assert end is not None
    assert end.kind == "broken"
    assert first.next_rendezvous().world_size == 1


def test_a_node_that_was_paused_for_too_long_finds_out_and_joins_again(c10d: Job) -> None:
    first, second = c10d.node(1, 2), c10d.node(1, 2)
    expected_rank = meet(first, second)[0].rank
    look_often(first, second)
    with second._changed:  # holds up the thread that refreshes the lease
        shorten_lease(second)
        end = first.watch_generation(0).wait(JOIN)
    assert end is not None
    assert second.node_id in end.reason
    lost = second.watch_generation(0).wait(JOIN)
    assert lost is not None
    assert lost.kind in ("lost", "broken")
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(second.next_rendezvous)
        info = first.next_rendezvous()
        if info.world_size == 1:  # it was quicker, and is told that the other one waits
            assert first.watch_generation(info.generation).wait(JOIN) is not None
            expected_rank = 0  # it was alone meanwhile, and keeps the rank that it had then
            info = first.next_rendezvous()
        assert back.result(JOIN).generation == info.generation
    assert (info.rank, info.world_size) == (expected_rank, 2)


def test_several_agents_race_to_serve_and_one_wins(held_port: int) -> None:
    job = Job("c10d", f"localhost:{held_port}")
    try:
        with ThreadPoolExecutor(4) as pool:
            handlers = list(pool.map(lambda _: job.node(4, 4), range(4)))
        assert sum(handler._is_host for handler in handlers) == 1
        assert sorted(info.rank for info in meet(*handlers)) == [0, 1, 2, 3]
    finally:
        host = [handler for handler in job.handlers if handler._is_host]
        job.handlers = host + [handler for handler in job.handlers if not handler._is_host]
        job.close()


def test_a_lost_store_is_a_clear_error_everywhere(c10d: Job) -> None:
    host, guest = c10d.node(2, 2), c10d.node(2, 2)
    meet(host, guest)
    watch = guest.watch_generation(0)
    assert host._close_store is not None
    stop_thread(host)
    host._agent_store.close()
    host._close_store()
    end = watch.wait(JOIN)
    assert end is not None
    assert end.kind == "lost"
    with pytest.raises(RendezvousConnectionError, match="is that one still running"):
        guest.next_rendezvous()
    assert guest.shutdown() is False


def test_an_endpoint_where_nobody_serves_is_a_clear_error(held_port: int) -> None:
    endpoint = f"localhost:{held_port}"
    params = RendezvousParameters("c10d", endpoint, "x", 1, 1, is_host=False, read_timeout=0.3)
    with pytest.raises(RendezvousConnectionError, match=r"cannot reach the rendezvous.*port open"):
        get_rendezvous_handler(params)


def test_a_store_without_rendezvous_is_a_clear_error() -> None:
    with TCPStore.serve() as stranger:
        endpoint = stranger.address.removeprefix("tcp://")
        params = RendezvousParameters("c10d", endpoint, "x", 1, 1, is_host=False, read_timeout=3)
        with pytest.raises(RendezvousConnectionError, match="no agent of this release"):
            get_rendezvous_handler(params)


def test_a_stranger_is_refused_and_logged(c10d: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secrets = []
    for name in ("right", "wrong"):
        secrets.append(tmp_path / name)
        secrets[-1].write_text(f"the {name} secret")
        secrets[-1].chmod(0o600)
    with caplog.at_level(logging.WARNING):
        member = c10d.node(1, 2, secret_file=str(secrets[0]), last_call_timeout=0)
        info = member.next_rendezvous()
        for config, complaint in (
            ({}, "set PHALANX_JOB_SECRET"),
            ({"secret_file": str(secrets[1])}, "signed with another secret"),
        ):
            with pytest.raises(RendezvousStateError, match=complaint):
                c10d.node(1, 2, **config).next_rendezvous()
        friend = c10d.node(1, 2, secret_file=str(secrets[0]))
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(friend.next_rendezvous)
            assert member.watch_generation(0).wait(JOIN) is not None
            assert member.next_rendezvous().world_size == 2
            assert joined.result(JOIN).generation == 1
    refused = [record.getMessage() for record in caplog.records if "refused the join" in record.getMessage()]
    assert len(refused) == 2, refused
    assert info.world_size == 1


@pytest.mark.parametrize("secret", [None, b"guessed"], ids=["unsigned", "another secret"])
def test_a_strangers_forged_record_of_every_kind_is_refused_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, secret: bytes | None
) -> None:
    """A job with a secret; a stranger writes each kind of record into its store, valid in all but the signature."""
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    caplog.set_level(logging.WARNING)
    job = Job("c10d", "localhost:0")
    try:
        handler = job.node(1, 1, close_timeout=0)  # the forged node will not leave before it does
        info = handler.next_rendezvous()
        raw = handler._store
        stranger = Signer(job.run_id, secret)
        cause = Broken(reason="forged").to_json()
        failure = FailureReport(local_rank=0, pid=1, exitcode=1, rank=0, host="h", worker_id="w")
        forged = {
            protocol.CLOSED: Closing(reason="forged").to_json(),
            protocol.WAITING: b"7",
            protocol.node_key("stranger"): replace(handler._participant.node, id="stranger").to_json(),
            broken_key(0): cause,
            wanted_key(0): cause,
            members_key(1): info.members().to_json(),
            wish_key(info.node.id): b"9",
            leaving_key(0, "w"): b"1",
            progress_key("w"): ProgressReport(step=9).to_json(),
            recovery_key(0): Recovery(action=Action.FAIL, restarts=0, reason="forged").to_json(),
            stacks_key(0): b'{"v":1,"reason":"forged"}',
            f"{failures_prefix(0)}w": failure.to_json(),
        }
        for key, record in forged.items():
            raw.set(key, stranger.seal(key, record))
        ring(raw, handler._signer)
        rings = SealedStore(raw, handler._signer).count(protocol.BELLS)
        with handler._changed:  # until the look at the records that this ring calls for is over
            assert handler._changed.wait_for(lambda: handler._participant._heard >= rings, JOIN)
        assert not handler.is_closed()
        assert handler.num_nodes_waiting() == 0
        assert handler.watch_generation(0).wait(0) is None
        assert handler._participant.facts.latest.generation == 0
        channel = AgentChannel(info.store)
        assert channel.recovery(0) is None
        assert channel.failures(0) == {}
        assert channel.read_requests(0, info.node.id) == (None, "", Setbacks(), "")
        assert not channel.is_leaving(0, "w")
        assert channel.read_progress(["w"]) == {"w": None}
        assert info.store.get_many([broken_key(0), wanted_key(0), members_key(1)]) == [None] * 3
        told = "\n".join(record.getMessage() for record in caplog.records)
        silent = [key for key in forged if f"the record at {key!r}" not in told]
        assert silent == []
        assert told.count("the record at 'rdzv/closed'") == 1, told  # however often it was looked at
        # And the real ones take their places.
        handler.break_generation(0, Broken(reason="real"))
        end = handler.watch_generation(0).wait(JOIN)
        assert end is not None
        assert end.reason == "real"
        assert Broken.from_json(info.store.get(broken_key(0)) or b"").reason == "real"
        after = handler.next_rendezvous()
        assert (after.generation, after.world_size) == (1, 1)
        assert Members.from_json(after.store.get(members_key(1)) or b"").workers[0].id != "w"
        handler.set_closed()
        assert handler.is_closed()
    finally:
        job.close()


def test_without_a_word_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    job = Job("c10d", "localhost:0")
    try:
        handler = job.node(1, 1)
        assert handler.next_rendezvous().world_size == 1
        assert handler._signer.has_secret
    finally:
        job.close()


def test_static_ranks_are_what_nodes_were_told(static: Job) -> None:
    handlers = [static.node(3, 3, rank=rank) for rank in (0, 2, 1)]
    assert [info.rank for info in meet(*handlers)] == [0, 2, 1]
    handlers[0].break_generation(0, Broken(reason="again"))
    assert [info.rank for info in meet(*handlers)] == [0, 2, 1]


def test_a_static_rank_that_two_nodes_were_told_is_a_clear_error(static: Job) -> None:
    first, second, twice = (static.node(2, 2, rank=rank) for rank in (0, 1, 1))
    with ThreadPoolExecutor(3) as pool:
        twins = [pool.submit(handler.next_rendezvous) for handler in (second, twice)]
        wait_until(lambda: len(first._store.items(protocol.NODES)) == 2)
        zero = pool.submit(first.next_rendezvous)
        assert zero.result(JOIN).rank == 0
        errors = [future.exception(JOIN) for future in twins]
    (error,) = (error for error in errors if error is not None)
    assert isinstance(error, RendezvousStateError)
    assert "node rank 1 of job" in str(error)


def test_a_static_rank_that_a_running_node_has_is_a_clear_error(static: Job) -> None:
    first, second = (static.node(2, 2, rank=rank) for rank in (0, 1))
    meet(first, second)
    late = static.node(2, 2, rank=1, lease=1)
    with pytest.raises(RendezvousStateError, match=f"node rank 1 .* is taken by {second.node_id}"):
        late.next_rendezvous()


def test_a_static_rank_passes_from_a_dead_node_to_its_replacement(static: Job) -> None:
    first, second = (static.node(2, 2, rank=rank) for rank in (0, 1))
    meet(first, second)
    stop_thread(second)  # it is dead, and its lease has yet to run out
    replacement = static.node(2, 2, rank=1)
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(replacement.next_rendezvous)
        wait_until(lambda: len(first._store.items(protocol.NODES)) == 3)
        shorten_lease(second)
        look_often(first)
        end = first.watch_generation(0).wait(JOIN)
        assert end is not None
        again = pool.submit(first.next_rendezvous)
        assert [future.result(JOIN).rank for future in (again, joined)] == [0, 1]


def test_one_static_node_leaves_its_port_to_the_workers() -> None:
    job = Job("static", "127.0.0.1:29555")
    try:
        info = job.node(1, 1).next_rendezvous()
        assert info.bootstrap_store_info.master_port == 29555
    finally:
        job.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("low", "high", "config", "message"),
    [
        (1, 2, {}, "fixed number"),
        (2, 2, {}, "needs the rank"),
        (2, 2, {"rank": 2}, "outside"),
    ],
)
def test_impossible_static_parameters(low: int, high: int, config: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_rendezvous_handler(RendezvousParameters("static", "localhost:1", "x", low, high, None, **config))


@pytest.mark.fast
def test_the_registry_takes_third_party_backends_and_names_the_nearest() -> None:
    registry = RendezvousHandlerRegistry()
    made: list[RendezvousParameters] = []

    def creator(params: RendezvousParameters) -> RendezvousHandler:
        made.append(params)
        return None  # type: ignore[return-value]  # on purpose

    registry.register("mine", creator)
    registry.register("mine", creator)
    with pytest.raises(ValueError, match="registered already"):
        registry.register("mine", lambda params: creator(params))
    with pytest.raises(TypeError, match="no RendezvousHandler"):
        registry.create_handler(RendezvousParameters("mine", "", "x", 1, 1))
    assert len(made) == 1
    assert rendezvous_handler_registry.names() == ["c10d", "etcd", "etcd-v2", "file", "static"]
    with pytest.raises(ValueError, match="did you mean 'c10d'"):
        get_rendezvous_handler(RendezvousParameters("c10", "", "x", 1, 1))


def test_no_thread_is_left_behind(c10d: Job) -> None:
    before = set(threading.enumerate())
    handlers = [c10d.node(2, 2) for _ in range(2)]
    meet(*handlers)
    handlers[0].set_closed()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda handler: handler.shutdown(), handlers)) == [True, True]
    assert set(threading.enumerate()) - before == set()


def test_who_left_is_not_told_that_it_could_not_because_the_store_ended_at_once(c10d: Job) -> None:
    host, other = handlers = [c10d.node(2, 2) for _ in range(2)]
    meet(*handlers)
    host.set_closed()
    leave = other._participant.leave  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(host.shutdown)

        def leave_and_see_the_store_end() -> None:
            leave()
            assert ended.result(60.0)

        other._participant.leave = leave_and_see_the_store_end  # type: ignore[attr-defined]
        assert other.shutdown()
