"""A connection to a store that ends while the server is fine: the client makes another, to the same server only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from phalanx.comm.stores import TCPStore, _torch_link, connect
from phalanx.errors import StoreLost

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server() -> Iterator[TCPStore]:
    store = TCPStore.serve()
    yield store
    store.close()


def port_of(store: TCPStore) -> int:
    return int(store.address.rpartition(":")[2])


def end_connections(port: int) -> int:
    """End all connections of this process to a port under the feet of those who use them; how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:
            continue  # gone
        try:
            copy = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue  # no socket
        with copy:
            try:
                if copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
                    count += 1
            except (OSError, IndexError):
                continue  # not connected
    return count


def test_every_call_goes_on_after_its_connection_has_ended(server: TCPStore) -> None:
    client = connect(server.address)
    client.set("a", b"1")
    lease = client.lease(60.0)
    calls = [
        lambda: client.get("a") == b"1",
        lambda: client.get_many(["a", "b", "c"]) == [b"1", None, None],
        lambda: client.set("b", b"2") is None and client.get("b") == b"2",
        lambda: client.compare_and_set("c", None, b"3"),
        lambda: client.items() == {"a": b"1", "b": b"2", "c": b"3"},
        lambda: client.wait(["a", "b"], 5.0) == [b"1", b"2"],
        lease.refresh,
        lambda: client.set("d", b"4", lease=lease) is None and client.get("d") == b"4",
        lambda: client.delete("d"),
        # it looks first, and that finds the connection ended: nothing was added yet
        lambda: client.add("n") == 1,
        lambda: client.clone().get("a") == b"1",
    ]
    for number, call in enumerate(calls):
        assert end_connections(port_of(server)) >= 1
        assert call(), f"call {number}"
    client.close()
    with pytest.raises(StoreLost, match="closed by this client"):
        client.get("a")


def test_a_watch_hears_what_was_written_over_a_connection_that_had_ended(server: TCPStore) -> None:
    client = connect(server.address)
    with server.watch("k") as watch:
        for number in range(5):
            end_connections(port_of(server))
            client.set(f"k{number}", b"v")
            assert [change.key for change in watch.wait(20.0)] == [f"k{number}"]
    client.close()


def test_another_server_at_the_same_address_is_not_taken_for_the_one_that_was_there(server: TCPStore) -> None:
    client, port = connect(server.address), port_of(server)
    client.set("a", b"1")
    server.close()
    end_connections(port)
    other = TCPStore.serve(port=port)
    try:
        with pytest.raises(StoreLost):
            client.get("a")
        with pytest.raises(StoreLost):
            client.set("a", b"2")
        assert other.items() == {}
    finally:
        other.close()


def test_a_stranger_who_writes_over_what_names_the_server_does_not_cut_its_clients_off(
    server: TCPStore,
) -> None:
    client = connect(server.address)
    client.set("a", b"1")
    native = server._link.native
    for key in [key for key in native.list_keys() if key.startswith("p/server")]:
        native.set(key, b"stranger")
    late = connect(server.address)
    for store in (client, late):
        assert end_connections(port_of(server)) >= 1
        assert store.get("a") == b"1"
    for store in (client, late):
        store.close()


def test_a_connection_that_ends_again_at_once_is_made_once_more(server: TCPStore) -> None:
    client = connect(server.address)
    assert isinstance(client, TCPStore)
    ends = iter(range(3))

    def end_and_read() -> list[str]:
        if next(ends, None) is not None:
            end_connections(port_of(server))
        return list(client._link.native.list_keys())

    assert client._link.call(end_and_read)
    client.close()


class Relay:
    """Hands on what clients and a server say to each other, until ``mute`` swallows all that comes from then on over
    the connections that there are: as a network that is away, and comes back when TCP has all but given up."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[list[bool]] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def mute(self) -> None:
        for is_open in self._pairs:
            is_open[0] = False

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                is_open = [True]
                self._pairs.append(is_open)
                self._sockets += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._hand_on, args=(one, other, is_open), daemon=True).start()

    @staticmethod
    def _hand_on(one: socket.socket, other: socket.socket, is_open: list[bool]) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if is_open[0]:
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()


def test_a_network_that_was_away_for_longer_than_a_reply_may_take_costs_one_connection(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_link, "REPLY_TIMEOUT", 1.0)
    relay = Relay(port_of(server))
    client = connect(f"tcp://127.0.0.1:{relay.port}")
    try:
        client.set("a", b"1")
        relay.mute()
        assert client.get("a") == b"1"
        relay.mute()
        client.set("b", b"2")
        assert server.get("b") == b"2"
    finally:
        client.close()
        relay.close()
