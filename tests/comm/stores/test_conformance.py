"""What every store guarantees, checked on all four."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phalanx.comm.stores import Change, Lease, Store
from phalanx.errors import StoreError, StoreLost, StoreTimeout


@pytest.fixture
def store(place: Any) -> Store:
    return place.open()


@pytest.fixture
def other(place: Any) -> Store:
    return place.open()


def collect(watch: Any, enough: Callable[[dict[str, bytes | None]], bool], seconds: float = 60) -> list[Change]:
    """Changes until the last known values satisfy ``enough``."""
    changes: list[Change] = []
    deadline = time.monotonic() + seconds
    while not enough({change.key: change.value for change in changes}):
        assert time.monotonic() < deadline, f"only saw {changes}"
        changes += watch.wait(1.0)
    return changes


NEARLY = 0.95  # of a time-to-live; a file system's clock moves in steps of some milliseconds


def bind(key: str, value: bytes, store: Store, ttl: float) -> Lease:
    """Set a key with a lease. If that takes longer than the lease lasts, because the machine stalls, try again."""
    while True:
        started = time.monotonic()
        lease = store.lease(ttl)
        try:
            store.set(key, value, lease=lease)
            return lease
        except StoreError:
            assert time.monotonic() - started >= NEARLY * ttl, "the lease ended before its time"


def keep_refreshed(store: Store, ttl: float, holds: Callable[[], bool]) -> None:
    """Refresh a lease for longer than its time-to-live; ``holds`` must be true all the while.

    A machine may stall this thread for longer than ``ttl``; the lease is right to end then, and we start again.
    """
    while True:
        refreshed = time.monotonic()
        lease = bind("k", b"v", store, ttl)
        started = time.monotonic()
        while time.monotonic() < started + 2 * ttl:
            before = time.monotonic()
            alive = lease.refresh() and holds()
            if time.monotonic() - refreshed >= NEARLY * ttl:
                break
            assert alive, "the lease ended although it was refreshed in time"
            refreshed = before
            time.sleep(ttl / 10)
        else:
            return


class TestValues:
    def test_a_value_that_was_set_is_seen_by_every_client(self, store: Store, other: Store) -> None:
        for number in range(50):
            store.set("k", b"%d" % number)
            assert other.get("k") == b"%d" % number

    def test_an_absent_key_is_none_at_once(self, store: Store) -> None:
        assert store.get("nothing") is None
        assert store.get_many(["nothing", "no/thing"]) == [None, None]

    @pytest.mark.parametrize(
        "value",
        [b"", b"0", b"\x00", b"\x00" * 64, bytes(range(256)), b"7\n", b"x" * 100_000],
        ids=lambda v: v[:5].hex(),
    )
    def test_values_are_any_bytes(self, store: Store, other: Store, value: bytes) -> None:
        store.set("k", value)
        assert other.get("k") == value
        assert other.items() == {"k": value}
        assert other.compare_and_set("k", value, b"next")
        assert store.get("k") == b"next"
        assert store.compare_and_set("k", b"next", value)
        assert other.wait(["k"], 5) == [value]

    @pytest.mark.parametrize("key", ["a b", "a/b//c", "ü/€", ".", "..", "%41", "a\nb", "k" * 150])
    def test_keys_are_any_text(self, store: Store, other: Store, key: str) -> None:
        store.set(key, b"v")
        assert other.get(key) == b"v"
        assert other.items() == {key: b"v"}
        assert other.delete(key)
        assert store.items() == {}

    def test_many_values_are_written_as_one_by_one(self, store: Store, other: Store) -> None:
        values = {f"k{number}": b"%d" % number for number in range(150)}
        store.set("k7", b"before")
        store.set_many(values)
        assert other.items() == values
        other.namespace("k").set_many({"a": b"1", "b": b""})
        assert store.get_many(["k/a", "k/b", "k7"]) == [b"1", b"", b"7"]
        store.set_many({})

    def test_get_many_keeps_the_order_of_the_keys(self, store: Store) -> None:
        for number in range(150):
            store.set(f"k{number}", b"%d" % number)
        keys = [f"k{number}" for number in reversed(range(160))]
        assert store.get_many(keys) == [b"%d" % number if number < 150 else None for number in reversed(range(160))]

    def test_delete_tells_whether_the_key_was_there(self, store: Store, other: Store) -> None:
        store.set("k", b"v")
        assert other.delete("k")
        assert not store.delete("k")
        assert store.get("k") is None

    def test_items_lists_a_prefix_in_the_order_of_the_keys(self, store: Store, other: Store) -> None:
        for key in ["n/2", "n/10", "m", "n/1", "nn", "n"]:
            store.set(key, key.encode())
        assert list(other.items("n/").items()) == [("n/1", b"n/1"), ("n/10", b"n/10"), ("n/2", b"n/2")]
        assert list(other.items()) == ["m", "n", "n/1", "n/10", "n/2", "nn"]
        assert other.items("zzz") == {}


class TestCounters:
    def test_add_counts_from_zero_and_up_and_down(self, store: Store, other: Store) -> None:
        assert store.add("n") == 1
        assert other.add("n", 5) == 6
        assert store.add("n", -10) == -4
        assert store.add("n", 0) == -4

    def test_a_counter_can_be_read_and_set(self, store: Store, other: Store) -> None:
        store.add("n", 41)
        assert other.get("n") == b"41"
        other.set("n", b"7")
        assert store.add("n") == 8
        assert store.compare_and_set("n", b"8", b"100")
        assert other.add("n") == 101

    @pytest.mark.parametrize("value", [b"text", b"", b"12abc", b"1.5"])
    def test_adding_to_what_is_no_number_is_refused_and_changes_nothing(self, store: Store, value: bytes) -> None:
        store.set("k", value)
        with pytest.raises(ValueError, match=r"cannot add to .*k"):
            store.add("k")
        assert store.get("k") == value


class TestCompareAndSet:
    def test_absent_is_expected_by_none(self, store: Store, other: Store) -> None:
        assert not store.compare_and_set("k", b"", b"v")
        assert not store.compare_and_set("k", b"old", b"v")
        assert store.get("k") is None
        assert store.compare_and_set("k", None, b"v")
        assert not other.compare_and_set("k", None, b"w")
        assert other.get("k") == b"v"

    def test_only_the_expected_value_is_replaced(self, store: Store, other: Store) -> None:
        store.set("k", b"a")
        assert not other.compare_and_set("k", b"b", b"c")
        assert other.compare_and_set("k", b"a", b"b")
        assert store.get("k") == b"b"

    def test_two_clients_that_write_the_same_bytes_do_not_both_win(self, store: Store, other: Store) -> None:
        assert store.compare_and_set("k", None, b"same")
        assert not other.compare_and_set("k", None, b"same")

    def test_a_deleted_key_is_absent_again(self, store: Store) -> None:
        store.set("k", b"v")
        store.delete("k")
        assert store.compare_and_set("k", None, b"w")


class TestManyClients:
    """Nothing is lost between 16 clients that write at the same time."""

    CLIENTS, ROUNDS = 16, 10

    def run(self, place: Any, work: Callable[[Store, int], Any]) -> list[Any]:
        stores = [place.open() for _ in range(self.CLIENTS)]
        start = threading.Barrier(self.CLIENTS)

        def client(index: int) -> Any:
            start.wait()
            return work(stores[index], index)

        with ThreadPoolExecutor(self.CLIENTS) as pool:
            return list(pool.map(client, range(self.CLIENTS)))

    def test_adds_are_all_counted_and_give_distinct_numbers(self, place: Any) -> None:
        seen = self.run(place, lambda store, _: [store.add("n") for _ in range(self.ROUNDS)])
        total = self.CLIENTS * self.ROUNDS
        assert sorted(number for numbers in seen for number in numbers) == list(range(1, total + 1))
        assert place.open().get("n") == b"%d" % total

    def test_a_list_grown_by_compare_and_set_loses_no_entry(self, place: Any) -> None:
        def append(store: Store, index: int) -> None:
            for number in range(3):
                done = False
                while not done:
                    before = store.get("list")
                    done = store.compare_and_set("list", before, (before or b"") + b"%d.%d " % (index, number))

        self.run(place, append)
        entries = (place.open().get("list") or b"").split()
        assert len(entries) == len(set(entries)) == self.CLIENTS * 3

    def test_exactly_one_client_wins(self, place: Any) -> None:
        for turn in range(3):
            won = self.run(place, lambda store, _, turn=turn: store.compare_and_set(f"{turn}", None, b"mine"))
            assert won.count(True) == 1


class TestWait:
    def test_values_that_are_there_come_at_once(self, store: Store) -> None:
        store.set("a", b"1")
        store.set("b", b"2")
        assert store.wait(["b", "a"], 0) == [b"2", b"1"]
        assert store.wait([], 0) == []

    def test_blocks_until_the_last_key_is_there(self, store: Store, other: Store) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["a", "b"], 60)
            other.set("a", b"1")
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            other.set("b", b"2")
            assert waiting.result(60) == [b"1", b"2"]

    def test_timeout_names_the_missing_keys_and_the_address(self, store: Store) -> None:
        store.set("there", b"")
        with pytest.raises(StoreTimeout, match=r"absent1.*absent2") as caught:
            store.wait(["absent1", "there", "absent2"], 0.1)
        assert "'there'" not in str(caught.value)
        assert store.address in str(caught.value)

    def test_a_blocked_wait_does_not_delay_a_clone(self, store: Store) -> None:
        twin = store.clone()
        try:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(store.wait, ["k"], 60)
                for number in range(20):
                    assert twin.add("n") == number + 1
                assert not waiting.done()
                twin.set("k", b"v")
                assert waiting.result(60) == [b"v"]
        finally:
            twin.close()


class TestWatch:
    def test_reports_changes_after_it_was_made_and_only_of_its_prefix(self, store: Store, other: Store) -> None:
        store.set("w/old", b"0")
        with store.watch("w/") as watch:
            assert watch.wait(0) == []
            other.set("w/a", b"1")
            other.set("v/a", b"no")
            other.add("w/n", 3)
            other.delete("w/old")
            other.compare_and_set("w/c", None, b"2")
            seen = collect(watch, lambda now: len(now) == 4)
        assert {change.key: change.value for change in seen} == {
            "w/a": b"1",
            "w/n": b"3",
            "w/old": None,
            "w/c": b"2",
        }

    def test_nothing_new_gives_an_empty_list(self, store: Store) -> None:
        store.set("k", b"v")
        with store.watch() as watch:
            assert watch.wait(0.05) == []

    def test_changes_of_a_key_come_in_order_and_end_with_the_last(self, store: Store, other: Store) -> None:
        with store.watch("k") as watch:
            for number in range(30):
                other.set("k", b"%d" % number)
            seen = collect(watch, lambda now: now.get("k") == b"29")
        numbers = [int(change.value or b"-1") for change in seen]
        assert numbers == sorted(set(numbers))

    def test_the_same_value_again_is_a_change(self, store: Store, other: Store) -> None:
        with store.watch() as watch:
            for _ in range(3):
                other.set("k", b"same")
                assert Change("k", b"same") in collect(watch, lambda now: "k" in now)

    def test_wakes_up_a_blocked_reader(self, store: Store, other: Store) -> None:
        with store.watch("k") as watch, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watch.wait, 60)
            other.set("k", b"v")
            assert waiting.result(60) == [Change("k", b"v")]


class TestLease:
    def test_keys_vanish_when_it_runs_out_and_watches_say_so(self, place: Any, store: Store, other: Store) -> None:
        with other.watch("node/") as watch:
            store.set("node/2", b"stays")
            seen: list[Change] = []
            while Change("node/1", b"here") not in seen:  # one that came and went between two looks is not seen
                lease = bind("node/1", b"here", store, place.ttl)
                while lease.refresh() and Change("node/1", b"here") not in seen:
                    seen += watch.wait(place.ttl / 10)
            while seen[-1] != Change("node/1", None):
                changes = watch.wait(60)
                assert changes, f"only saw {seen}"
                seen += changes
        assert Change("node/2", b"stays") in seen
        assert other.items() == {"node/2": b"stays"}
        assert other.get("node/1") is None
        assert not other.delete("node/1")
        late = place.open()
        assert late.items("node/") == {"node/2": b"stays"}
        with pytest.raises(StoreTimeout):
            late.wait(["node/1"], 0.05)
        assert not lease.refresh()
        with pytest.raises(StoreError, match="run out"):
            store.set("node/1", b"again", lease=lease)
        assert store.get("node/1") is None
        assert other.compare_and_set("node/1", None, b"new")
        assert store.wait(["node/1"], 60) == [b"new"]

    def test_a_counter_starts_anew_after_its_lease_ran_out(self, place: Any, store: Store, other: Store) -> None:
        lease = store.lease(60)
        store.set("n", b"5", lease=lease)
        lease.revoke()
        assert other.add("n", 2) == 2

    def test_refreshing_keeps_the_keys(self, place: Any, store: Store, other: Store) -> None:
        keep_refreshed(store, place.ttl, lambda: other.get("k") == b"v")

    def test_a_blocked_call_on_the_store_does_not_starve_its_lease(self, place: Any, store: Store) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["signal"], 100)
            try:
                keep_refreshed(store, place.ttl, lambda: not waiting.done())
            finally:
                place.open().set("signal", b"v")
            assert waiting.result(60) == [b"v"]

    def test_revoking_removes_the_keys_at_once(self, store: Store, other: Store) -> None:
        lease = store.lease(60)
        store.set("a", b"1", lease=lease)
        store.set("b", b"2", lease=lease)
        lease.revoke()
        assert other.items() == {}
        assert not lease.refresh()
        lease.revoke()

    def test_a_key_written_by_someone_else_outlives_the_lease(self, store: Store, other: Store) -> None:
        lease = store.lease(60)
        for key in ["set", "swapped", "added", "gone"]:
            store.set(key, b"1", lease=lease)
        other.set("set", b"2")
        assert other.compare_and_set("swapped", b"1", b"2")
        assert other.add("added") == 2
        lease.revoke()
        assert other.items() == {"added": b"2", "set": b"2", "swapped": b"2"}

    def test_a_foreign_lease_and_a_senseless_one_are_refused(self, store: Store) -> None:
        from phalanx.comm.stores import MemoryStore

        with pytest.raises(TypeError, match="was not made by"):
            store.set("k", b"v", lease=MemoryStore().lease(1))
        with pytest.raises(ValueError, match="positive"):
            store.lease(0)


class TestNamespace:
    def test_what_is_written_inside_is_invisible_outside(self, store: Store, other: Store) -> None:
        inside = store.namespace("job/7")
        inside.set("k", b"in")
        store.set("k", b"out")
        assert inside.items() == {"k": b"in"}
        assert store.items() == {"job/7/k": b"in", "k": b"out"}
        assert other.namespace("job").namespace("7").get("k") == b"in"
        assert other.namespace("job/77").items() == {}

    def test_every_operation_works_inside(self, store: Store) -> None:
        inside = store.namespace("g1").clone()
        try:
            lease = inside.lease(60)
            with inside.watch("a") as watch:
                inside.set("a", b"1", lease=lease)
                assert collect(watch, lambda now: "a" in now) == [Change("a", b"1")]
            assert inside.wait(["a"], 5) == [b"1"]
            assert inside.add("n") == 1
            assert inside.compare_and_set("n", b"1", b"2")
            assert inside.get_many(["n", "a", "x"]) == [b"2", b"1", None]
            assert inside.delete("n")
            lease.revoke()
            assert inside.items() == {}
        finally:
            inside.close()

    def test_a_namespace_needs_a_name(self, store: Store) -> None:
        with pytest.raises(ValueError, match="needs a name"):
            store.namespace("/")


class TestClose:
    def test_a_closed_client_says_so_and_the_others_go_on(self, place: Any, store: Store) -> None:
        twin = store.clone()
        twin.set("k", b"v")
        twin.close()
        twin.close()
        with pytest.raises(StoreLost, match="closed") as caught:
            twin.get("k")
        assert caught.value.address == store.address
        assert store.get("k") == b"v"
