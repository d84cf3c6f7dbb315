"""All addresses of a host are tried, whatever the others do, and the first that answers is used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from phalanx import _reach
from phalanx._reach import Unreachable, Way, reach
from phalanx.comm.stores import TCPStore
from phalanx.launch.system._addresses import source_towards

pytestmark = pytest.mark.fast

SILENT = "127.0.0.9"


@contextmanager
def silence(port: int) -> Iterator[None]:
    """At this port of ``SILENT`` nobody answers: its queue is full, so that the kernel drops whoever calls."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind((SILENT, port))
        server.listen(0)
        for _ in range(4):
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((SILENT, port))
        yield


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    real = _reach.addresses_of
    monkeypatch.setattr(_reach, "addresses_of", lambda host: known.get(host) or real(host))
    return known


def test_a_refusal_and_a_silence_do_not_keep_the_next_from_being_tried(names: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        port = server.getsockname()[1]
        names["host"] = ["127.0.0.2", SILENT, "127.0.0.3"]
        with silence(port):
            connection, way = reach("host", port, 30.0)
        with connection:
            assert way == Way("127.0.0.3", "127.0.0.1")
            assert connection.getpeername() == ("127.0.0.3", port)
            assert connection.gettimeout() is None


def test_ipv6_is_reached_where_the_name_has_both(names: dict[str, list[str]]) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        names["both"] = ["127.0.0.1", "::1"]
        connection, way = reach("both", port, 30.0)
        connection.close()
        assert way == Way("::1", "::1")


def test_when_nobody_answers_each_address_has_its_reason(held_port: int, names: dict[str, list[str]]) -> None:
    names["host"] = ["127.0.0.1", SILENT]
    names["dark"] = [SILENT]
    with silence(held_port):
        with pytest.raises(
            Unreachable, match=r"0\.1: Connection refused, 127\.0\.0\.9: no answer within 0\.3"
        ) as caught:
            reach("host", held_port, 0.3)
        assert caught.value.refused == Way("127.0.0.1", "127.0.0.1")
        with pytest.raises(Unreachable) as caught:
            reach("dark", held_port, 0.3)
        assert caught.value.refused is None
    with pytest.raises(Unreachable, match=r"'no\.such\.host\.invalid' leads to no address"):
        reach("no.such.host.invalid", 1, 0.3)


def test_the_address_that_reaches_a_host_is_that_of_the_answer(held_port: int, names: dict[str, list[str]]) -> None:
    names["host"] = [SILENT, "::1"]
    with silence(held_port):
        assert source_towards("host", held_port, patience=1.0) == "::1", "a refusal is an answer"


def test_a_store_is_found_at_whichever_address_it_is(names: dict[str, list[str]]) -> None:
    """torch would connect to the first address and wait there."""
    with TCPStore.serve("127.0.0.3") as server:
        port = int(server.address.rpartition(":")[2])
        names["host"] = [SILENT, "127.0.0.2", "127.0.0.3"]
        with silence(port), TCPStore("host", port, timeout=30.0) as client:
            assert client.add("count") == 1
            assert client.address == f"tcp://host:{port}"
