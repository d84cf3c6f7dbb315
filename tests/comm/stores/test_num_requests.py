"""How many requests meeting others takes: of a real TCP store, and of gloo while it connects its ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks._counted_store import CountedStore, Requests

from phalanx.comm.stores import MemoryStore, TCPStore
from phalanx.comm.stores._for_torch import exchange_for_torch
from phalanx.errors import StoreTimeout

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with TCPStore.serve() as store:
        yield store


@pytest.fixture
def num_calls(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count = [0]
    call = store._link.call

    def counted(operation: Callable[[], Any], **options: Any) -> Any:
        count[0] += 1
        return call(operation, **options)

    monkeypatch.setattr(store._link, "call", counted)

    def since_last() -> int:
        found, count[0] = count[0], 0
        return found

    return since_last


def test_waiting_for_many_keys_is_two_requests_once_they_are_there(store, num_calls):
    keys = [f"ready/{number}" for number in range(200)]
    for key in keys:
        store.set(key, key.encode())
    num_calls()
    assert store.wait(keys, 1.0) == [key.encode() for key in keys]
    assert num_calls() == 2


def test_a_few_missing_keys_among_many_cost_a_few_requests(store, num_calls):
    keys = [f"ready/{number}" for number in range(256)]
    for key in keys:
        if key != "ready/77":
            store.set(key, b"1")
    num_calls()
    assert [key for key, value in zip(keys, store.get_many(keys), strict=True) if value is None] == ["ready/77"]
    assert num_calls() < 32
    with pytest.raises(StoreTimeout, match=r"no \['ready/77'\] after 0 s"):
        store.wait(keys, 0.0)
    assert num_calls() < 32


def test_a_deleted_key_is_missing_to_who_waits_for_it_and_others(store):
    for key in "abc":
        store.set(key, b"1")
    store.delete("b")
    with pytest.raises(StoreTimeout, match=r"no \['b'\]"):
        store.wait(list("abc"), 0.01)


@pytest.mark.parametrize("size", [2, 6])
def test_a_rank_of_gloo_asks_twice_however_many_there_are(size):
    root = MemoryStore()
    requests = [Requests() for _ in range(size)]
    made: list[Any] = [None] * size

    def main(rank: int) -> None:
        counted = CountedStore(root.clone(), requests[rank], patient=True)
        native = exchange_for_torch(counted.as_c10d(), rank, size, 60.0)
        native.set_timeout(timedelta(seconds=60))
        made[rank] = dist.ProcessGroupGloo(native, rank, size, timedelta(seconds=60))
        made[rank].barrier().wait()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(engine is not None for engine in made)
    first, *others = requests
    assert dict(first.calls) == {"set": 2, "wait": 1}, first.named
    assert [dict(one.calls) for one in others] == [{"set": 1, "wait": 1}] * (size - 1), others[0].named
