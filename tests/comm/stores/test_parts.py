"""The parts that stores are made of: pure book-keeping, addresses, and the bridge to torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.stores import FileStore, MemoryStore, _torch_lease, connect, wrap_c10d_store
from phalanx.comm.stores._etcd_gateway import EtcdError, Gateway, range_end
from phalanx.comm.stores._polling import LONGEST, SHORTEST, changes_between, pause_after
from phalanx.comm.stores._stored_value import Writer, decode
from phalanx.comm.stores._torch_lease import LOOK, LeaseTable, Reaper
from phalanx.errors import StoreError, StoreTimeout

pytestmark = pytest.mark.fast


class TestRecord:
    @given(st.binary(max_size=200), st.none() | st.integers(1, 2**63))
    def test_what_is_written_is_read(self, value: bytes, lease: int | None) -> None:
        record = decode(Writer().encode(value, lease))
        assert (record.value, record.lease) == (value, lease)

    @given(st.integers(-(2**63), 2**63 - 1))
    def test_counters_of_the_server_are_read_as_they_are(self, number: int) -> None:
        assert decode(b"%d" % number).value == b"%d" % number

    def test_no_two_entries_are_alike_and_tombstones_are_absent(self) -> None:
        writer = Writer()
        assert len({writer.encode(b"same") for _ in range(100)}) == 100
        assert decode(writer.tombstone()).value is None
        assert decode(writer.tombstone()).raw is not None


class TestLeaseTable:
    def table(self) -> LeaseTable:
        table = LeaseTable()
        table.start(1, 1.0, now=0.0)
        assert table.observe({1: b"1"}, now=0.0) == []
        return table

    def test_ends_one_ttl_after_the_last_beat_that_was_seen(self) -> None:
        table = self.table()
        times = [LOOK * number for number in range(1, 60)]
        ended = [now for now in times if table.observe({1: b"2" if now > 0.5 else b"1"}, now)]
        assert ended[0] == pytest.approx(1.55, abs=LOOK)

    def test_a_pause_of_the_reaper_is_not_held_against_the_owner(self) -> None:
        table = self.table()
        assert table.observe({1: b"1"}, now=30.0) == []
        assert table.observe({1: b"2"}, now=30.05) == []

    def test_a_revoked_lease_ends_at_once(self) -> None:
        assert self.table().observe({1: b"ended"}, now=0.1) == [1]
        assert self.table().observe({1: None}, now=0.1) == [1]


class StallingLink:
    """A server with one lease, whose heartbeat another process may move while it is being read."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.native = SimpleNamespace(queue_len=lambda name: 0)
        self.beat = b"1"
        self.while_reading: Callable[[], None] | None = None
        self.ended = False

    def call(self, operation: Callable[[], Any]) -> Any:
        return operation()

    def read_many(self, keys: list[str]) -> list[bytes]:
        if self.while_reading is not None:
            self.while_reading()
            self.while_reading = None
        return [self.beat]

    def read(self, key: str) -> bytes | None:
        return None

    def swap(self, key: str, expected: bytes, raw: bytes) -> bool:
        self.ended = self.ended or expected == self.beat
        return expected == self.beat


def test_a_stall_of_the_reaper_between_clock_and_heartbeats_ends_no_lease_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(_torch_lease, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    link = StallingLink(clock)
    reaper = Reaper.__new__(Reaper)  # without its thread
    reaper._link, reaper._writer, reaper._table, reaper._graves = link, Writer(), LeaseTable(), {}
    reaper._table.start(1, 1.0, now=0.0)
    reaper._look()

    def stall_and_beat() -> None:
        clock[0], link.beat = 0.95, b"2"

    clock[0], link.while_reading = LOOK, stall_and_beat
    while clock[0] < 1.94:
        reaper._look()
        assert not link.ended, f"at {clock[0]:.2f}, although it was refreshed at 0.95 for one second"
        clock[0] += LOOK
    clock[0] += LOOK
    reaper._look()
    assert link.ended


class TestMemoryTime:
    def test_leases_follow_the_clock_that_was_passed_in(self) -> None:
        now = [0.0]
        store = MemoryStore(clock=lambda: now[0])
        lease = store.lease(10)
        store.set("k", b"v", lease=lease)
        now[0] = 9.9
        assert lease.refresh()
        now[0] = 19.8
        assert store.get("k") == b"v"
        now[0] = 19.9
        assert store.get("k") is None
        assert not lease.refresh()


def test_changes_and_pauses() -> None:
    assert changes_between({"a": b"1", "b": b"1"}, {"b": b"2", "c": b"1"}) == ["a", "b", "c"]
    assert pause_after(0) == SHORTEST
    assert pause_after(0.08) == pytest.approx(0.01)
    assert pause_after(100) == LONGEST


@pytest.mark.parametrize("words", ["raft: stopped", "raft proposal dropped"])
def test_a_member_that_was_taken_out_or_has_no_leader_is_passed_over(words: str) -> None:
    """It says so without a code that tells it from an error of the request."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 1:
            return httpx.Response(500, json={"error": words, "code": 2})
        if request.url.path == "/odd":
            return httpx.Response(500, json={"error": "odd", "code": 2})
        return httpx.Response(200, json={"said": "yes"})

    gateway = Gateway(["a:1", "b:2"])
    gateway.client().close()
    gateway._client = httpx.Client(transport=httpx.MockTransport(answer))
    assert gateway.call("/v3/kv/range", {}) == {"said": "yes"}
    with pytest.raises(EtcdError, match="odd"):
        gateway.call("/odd", {})
    gateway.close()


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_the_end_of_an_etcd_prefix(prefix: bytes, key: bytes) -> None:
    end = range_end(prefix)
    inside = key >= prefix and (end == b"\x00" or key < end)
    if prefix.strip(b"\xff"):
        assert inside == key.startswith(prefix)


class TestConnect:
    def test_a_name_is_one_store_for_all_threads_while_somebody_has_it(self) -> None:
        first = connect("memory://here")
        seen: list[bytes | None] = []
        first.set("k", b"v")
        thread = threading.Thread(target=lambda: seen.append(connect("memory://here").get("k")))
        thread.start()
        thread.join()
        assert seen == [b"v"]
        assert connect("memory://elsewhere").get("k") is None

    def test_a_directory_with_odd_characters(self, tmp_path: Path) -> None:
        store = FileStore(tmp_path / "a b%c")
        store.set("k", b"v")
        assert connect(store.address).get("k") == b"v"

    @pytest.mark.parametrize(
        "url", ["", "tcp://host", "tcp://:1", "file://host/x", "file:///", "http://h:1", "etcd://"]
    )
    def test_other_addresses_are_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match="not the address of a store"):
            connect(url)


class TestTorch:
    """Our stores as stores of torch, and the other way round."""

    @pytest.fixture(params=["memory", "file"])
    def native(self, request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
        ours = MemoryStore() if request.param == "memory" else FileStore(tmp_path)
        return dist.PrefixStore("g", ours.namespace("job").as_c10d())

    def test_answers_like_a_store_of_torch(self, native: dist.Store) -> None:
        reference = dist.HashStore()
        for calls in [
            lambda s: s.set("k", b"\xff\x00"),
            lambda s: s.get("k"),
            lambda s: s.add("n", 3),
            lambda s: s.add("n", -1),
            lambda s: s.check(["k", "n"]),
            lambda s: s.check(["k", "absent"]),
            lambda s: s.compare_set("c", "", "1"),
            lambda s: s.compare_set("c", "2", "3"),
            lambda s: s.compare_set("c", "1", "3"),
            lambda s: s.compare_set("d", "1", "3"),
            lambda s: s.append("k", b"\xfe"),
            lambda s: s.multi_set(["x", "y"], [b"1", b"\xff"]),
            lambda s: s.multi_get(["y", "x", "k"]),
            lambda s: s.wait(["x", "y"]),
            lambda s: s.wait(["x"], timedelta(seconds=1)),
            lambda s: s.delete_key("x"),
            lambda s: s.delete_key("x"),
            lambda s: s.has_extended_api(),
            lambda s: s.clone().get("y"),
        ]:
            assert calls(native) == calls(reference)

    def test_waiting_ends_with_an_error(self, native: dist.Store) -> None:
        with pytest.raises(StoreTimeout, match="absent"):
            native.wait(["absent"], timedelta(seconds=0.05))
        native.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(StoreTimeout, match="absent"):
            native.get("absent")

    def test_a_store_that_a_user_brings(self) -> None:
        store = wrap_c10d_store(dist.PrefixStore("theirs", dist.HashStore()))
        other = store.clone()
        store.set("a", b"1")
        assert other.add("a") == 2
        assert other.compare_and_set("a", b"2", b"x")
        assert store.namespace("n").get("a") is None
        assert store.items() == {"a": b"x"}
        with store.watch() as watch:
            other.delete("a")
            assert [change.value for change in watch.wait(60)] == [None]
        with pytest.raises(StoreError, match="keeps no leases"):
            store.lease(1)
        store.as_c10d("g").set("k", "v")
        assert other.items() == {}


def test_a_store_of_ours_that_torch_prefixed_keeps_its_prefix() -> None:
    ours = MemoryStore()
    native = ours.as_c10d()
    first = wrap_c10d_store(dist.PrefixStore("a", dist.PrefixStore("b", native)))
    second = wrap_c10d_store(dist.PrefixStore("c", native))
    first.set("key", b"1")
    assert second.get("key") is None
    assert wrap_c10d_store(dist.PrefixStore("a", dist.PrefixStore("b", native))).get("key") == b"1"
