"""Many clients add to one counter at once: none tries about as often as there are others."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from phalanx.comm.stores import MemoryStore, TCPStore
from phalanx.comm.stores._counter import longest_pause
from phalanx.comm.stores._sealed import SealedStore
from phalanx.comm.stores._signing import Signer

pytestmark = pytest.mark.fast

ROUND_TRIP = 0.001


def tries_of(num_clients: int, pause: Callable[[int], float]) -> list[int]:
    """How often each tries: all begin together, reading takes a round trip, and so does writing if nothing changed.

    A model without a store: a write succeeds when no other one has between its reading and it.
    """
    tries, last_write = [0] * num_clients, -1.0
    to_write = [(ROUND_TRIP * (1 + client / num_clients), client, ROUND_TRIP * client / num_clients)
                for client in range(num_clients)]  # fmt: skip
    heapq.heapify(to_write)
    while to_write:
        now, client, has_read = heapq.heappop(to_write)
        tries[client] += 1
        if has_read > last_write:
            last_write = now
        else:
            reads = now + pause(tries[client])
            heapq.heappush(to_write, (reads + ROUND_TRIP, client, reads))
    return tries


@pytest.mark.parametrize("num_clients", [8, 64, 1000])
def test_tries_grow_with_the_logarithm_of_the_number_of_clients(num_clients: int) -> None:
    chance = random.Random(0)
    with_pauses = tries_of(num_clients, lambda num_tries: chance.uniform(0, longest_pause(num_tries)))
    without = tries_of(num_clients, lambda num_tries: 0.0)
    assert max(without) == num_clients, "one gets through at a time"
    assert sum(with_pauses) / num_clients < 2 + num_clients.bit_length()
    assert max(with_pauses) < 4 * num_clients.bit_length()


@pytest.mark.parametrize("kind", ["torch", "sealed"])
def test_who_is_forestalled_pauses_longer_each_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(f"phalanx.comm.stores._{kind}.make_way", pauses.append)
    with TCPStore.serve() if kind == "torch" else MemoryStore() as root:
        store, other = (
            one if kind == "torch" else SealedStore(one, Signer("job", b"secret" * 6)) for one in (root, root.clone())
        )
        writer, name = (store._link, "swap") if kind == "torch" else (store._below, "compare_and_set")
        write = getattr(writer, name)
        first = iter(range(3))

        def late(*args: object) -> object:
            if next(first, None) is not None:
                other.add("n")
            return write(*args)

        monkeypatch.setattr(writer, name, late)
        assert store.add("n") == 4
    assert pauses == [1, 2, 3]
