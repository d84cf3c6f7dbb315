"""Which address the others of a job are told, and which interface gloo gets, where the machine's name is of no use."""

from __future__ import annotations

import pytest

from phalanx._reach import addresses_of
from phalanx.launch.rendezvous._backends import own_address
from phalanx.launch.system import _addresses
from phalanx.launch.system._addresses import (
    advertised_address,
    gloo_interface,
    interfaces,
    source_towards,
)

pytestmark = pytest.mark.fast

OWN = {"127.0.0.1": "lo", "10.0.0.7": "eth0", "fe80::1": "eth0", "fd00::7": "eth1"}


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_addresses, "interfaces", lambda: OWN)
    sources = {"node0": "fd00::7", "node4": "10.0.0.7", "me": "127.0.0.1", "gone": ""}
    monkeypatch.setattr(_addresses, "source_towards", lambda host, port: sources[host])


def lookup(name: str) -> list[str]:
    known = {"me": ["127.0.1.1"], "good": ["127.0.1.1", "10.0.0.7"], "front": ["192.0.2.1"]}
    return known.get(name, [name] if name[0].isdigit() or ":" in name else [])


def test_a_name_that_stands_for_what_reaches_the_store_is_kept():
    assert advertised_address("good", "node4", 1, lookup=lookup) == "good"
    assert advertised_address("good", "gone", 1, lookup=lookup) == "good", "nothing is known to work"
    assert advertised_address("good", "me", 1, lookup=lookup) == "good", "the store is here too"


def test_a_name_of_another_interface_or_machine_is_replaced_by_what_reaches_the_store(caplog):
    assert advertised_address("good", "node0", 1, lookup=lookup) == "fd00::7"
    assert (
        "leads to 10.0.0.7, which is not how this machine reaches the store; the others are told fd00::7" in caplog.text
    )
    assert advertised_address("front", "node4", 1, lookup=lookup) == "10.0.0.7", "a translator's"


def test_a_name_of_the_loopback_interface_is_replaced_by_what_reaches_the_store(caplog):
    assert advertised_address("me", "node0", 1, lookup=lookup) == "fd00::7"
    assert "leads to the loopback interface only; the others are told fd00::7" in caplog.text
    assert advertised_address("me", "me", 1, lookup=lookup) == "10.0.0.7", "the store is here too"
    assert advertised_address("me", "", 0, lookup=lookup) == "10.0.0.7", "the store is a directory"


def test_a_name_that_leads_nowhere_from_here_may_be_known_to_others_but_what_worked_is_better(caplog):
    assert advertised_address("unknown", "node0", 1, lookup=lookup) == "fd00::7"
    assert "leads nowhere from here; the others are told fd00::7" in caplog.text
    assert advertised_address("unknown", "gone", 1, lookup=lookup) == "unknown"
    assert advertised_address("unknown", "", 0, lookup=lookup) == "unknown"


def test_gloo_gets_the_interface_of_that_address(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    assert gloo_interface({}, "fd00::7", lookup=lookup) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "ib0"}, "fd00::7", lookup=lookup) == {}
    assert gloo_interface({}, "10.9.9.9", lookup=lookup) == {}
    monkeypatch.setattr("socket.gethostname", lambda: "good")
    assert gloo_interface({}, "10.0.0.7", lookup=lookup) == {}, "the name leads there"
    assert gloo_interface({}, "good", lookup=lookup) == {}
    assert gloo_interface({}, "fd00::7", lookup=lookup) == {"GLOO_SOCKET_IFNAME": "eth1"}, "the name leads elsewhere"
    assert gloo_interface({}, "127.0.0.1", lookup=lookup) == {}, "not the loopback interface's"


def test_the_store_of_each_backend_is_what_is_reached(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "phalanx.launch.rendezvous._backends.advertised_address", lambda name, *where: asked.append(where) or name
    )
    for backend, endpoint in (("c10d", "node0"), ("static", "[fd00::1]:5"), ("etcd", "e0:1,e1:2"),
                              ("etcd", "etcds://user@e0:1/x?ca=/y"), ("file", "/shared")):  # fmt: skip
        own_address(backend, endpoint)
    assert asked == [("node0", 29400), ("fd00::1", 5), ("e0", 1), ("e0", 1), ("", 0)]


def test_this_machine_as_it_is(monkeypatch):
    monkeypatch.undo()
    assert interfaces()["127.0.0.1"] == "lo"
    assert source_towards("127.0.0.1", 1) == "127.0.0.1"
    assert addresses_of("no.such.host.invalid") == []
