"""Makes a handler of anybody's, with no more than torch's interface, do for an agent: ``adapted``.

Such a handler agrees on ranks, the number of nodes and a c10d store. Everything else that an agent needs (a store of
the job that workers can reach, the end of a generation, leases, restarts that are counted for the whole job) comes from
the static rendezvous: the node that got rank 0 serves its store and tells the others where, through the c10d store.

Guarantees: every generation of the agents is one call of the handler's ``next_rendezvous``; nodes that it lets wait are
noticed within ``INTERVAL``; its errors are ours by their names, so that a graceful exit is one.
Assumptions, torch's own: all nodes of a generation get the same store, with no keys of an earlier one.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from phalanx.launch.rendezvous import _interface
from phalanx.launch.rendezvous._backends import OpenStore, make_handler, open_tcp, split_endpoint
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import (
    GenerationEnd,
    GenerationHandler,
    GenerationWatch,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from phalanx.launch.system._listen_address import LOOPBACK
from phalanx.protocol import ADAPTED_ENDPOINT, Broken, timeouts

INTERVAL = 0.2
"""Seconds between two looks at whether nodes wait: the interface has no way to be told."""


def adapted(handler: RendezvousHandler) -> GenerationHandler:
    """Return the handler itself if it can do all, else one that makes it do."""
    return handler if isinstance(handler, GenerationHandler) else AdaptedHandler(handler)


@dataclass(frozen=True)
class _AgreedPlace:
    """What the handler has agreed on, as far as it decides which store the job uses."""

    rank: int
    world_size: int
    endpoint: str = ""


class AdaptedHandler(GenerationHandler):
    """A handler with torch's interface as an agent uses it."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._inner: StoreRendezvousHandler | None = None
        self._round = _AgreedPlace(-1, 0)
        self._local: tuple[int, tuple[str, ...], str] = (1, (), "")
        self._told_port: int | None = None
        self._port: int | None = None

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def store_url(self) -> str:
        return self._inner.store_url if self._inner else ""

    @property
    def secret_file(self) -> str:
        return self._inner.secret_file if self._inner else ""

    @property
    def is_host(self) -> bool:
        return self._inner is not None and self._inner.is_host

    def set_local_size(self, local_size: int, worker_ids: tuple[str, ...] = (), role: str = "") -> None:
        self._local = (local_size, worker_ids, role)

    def set_bootstrap_port(self, port: int | None) -> None:
        self._told_port = port

    @property
    def has_fixed_port(self) -> bool:
        return self._port is not None

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            store, rank, world_size, bootstrap = _read(self._handler.next_rendezvous())
        except Exception as error:
            raise _ours(error) from error
        inner = self._meet(store, rank, world_size, bootstrap)
        inner.set_local_size(*self._local)
        if getattr(self._handler, "use_agent_store", False):
            # A store that the handler itself serves is the same for all restarts: living workers would read the keys of
            # dead ones. The agent serves a new one instead, at the same address.
            bootstrap = None
        self._port = bootstrap.master_port if bootstrap else self._told_port
        inner.set_bootstrap_port(self._port)
        info = inner.next_rendezvous()
        return info if bootstrap is None else replace(info, bootstrap_store_info=bootstrap)

    def _meet(
        self, store: Any, rank: int, world_size: int, bootstrap: RendezvousStoreInfo | None
    ) -> StoreRendezvousHandler:
        """Return this node's handler on the store that the node of rank 0 serves: the same as long as nothing moved."""
        stays = self._inner is not None and (self._round.rank, self._round.world_size) == (rank, world_size)
        address = bootstrap.master_addr if bootstrap else "localhost"
        opened: OpenStore | None = None
        if rank == 0:
            if stays and self._inner is not None:
                endpoint = self._round.endpoint
            else:
                opened = open_tcp(
                    "localhost" if world_size == 1 else address, 0, serve=True, timeout=timeouts.REACH_STORE
                )
                endpoint = opened.url.removeprefix("tcp://")
            if world_size > 1:
                store.set(ADAPTED_ENDPOINT, endpoint.encode())
        else:
            endpoint = self._endpoint_of_first(store, rank)
            stays = stays and endpoint == self._round.endpoint
        if self._inner is None or not stays:
            self.release()
            host, port = split_endpoint(endpoint, 0)
            opened = opened or open_tcp(host, port, serve=False, timeout=timeouts.REACH_STORE)
            params = RendezvousParameters(
                self.get_backend(), endpoint, self.get_run_id(), world_size, world_size, address if rank == 0 else None
            )
            self._inner = make_handler(params, opened, loopback=host in LOOPBACK, fixed_rank=rank)
            self._round = _AgreedPlace(rank, world_size, endpoint)
        return self._inner

    def _endpoint_of_first(self, store: Any, rank: int) -> str:
        try:
            return str(store.get(ADAPTED_ENDPOINT).decode())
        except Exception as error:  # whatever the handler's own store raises
            raise RendezvousConnectionError(
                f"node {rank} of job {self.get_run_id()!r} could not read, from the store that the rendezvous "
                f"{self.get_backend()!r} has given it, where node 0 serves the job's store: {error}. Have all nodes "
                "the same store, and does node 0 run?"
            ) from error

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def close_as(self, outcome: str, reason: str) -> None:
        # The handler itself is closed by whoever shuts it down, as with torch: other nodes may still be at work.
        if self._inner is not None:
            self._inner.close_as(outcome, reason)

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def break_generation(self, generation: int, broken: Broken) -> None:
        self._formed.break_generation(generation, broken)

    def want_generation(self, generation: int, cause: Broken) -> None:
        self._formed.want_generation(generation, cause)

    def watch_generation(self, generation: int) -> GenerationWatch:
        return _AdaptedWatch(self, self._formed.watch_generation(generation))

    @property
    def _formed(self) -> StoreRendezvousHandler:
        assert self._inner is not None, "there is no generation before the first rendezvous"
        return self._inner

    def release(self) -> None:
        """Give up what this object has opened; the handler it was made for stays as it is."""
        if self._inner is not None:
            self._inner.shutdown()
            self._inner = None

    def shutdown(self) -> bool:
        self.release()
        return self._handler.shutdown() is not False


class _AdaptedWatch(GenerationWatch):
    """Watches a generation of the inner handler, and whether nodes wait at the outer one."""

    def __init__(self, handler: AdaptedHandler, inner: GenerationWatch) -> None:
        self._handler = handler
        self._inner = inner
        self._is_closed = threading.Event()

    def wait(self, timeout: float | None = None) -> GenerationEnd | None:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self._is_closed.is_set():
            left = until - time.monotonic()
            end = self._inner.wait(max(0.0, min(left, INTERVAL)))
            if end is not None:
                return end
            try:
                count = self._handler.num_nodes_waiting()
            except Exception as error:
                return GenerationEnd(kind="lost", reason=f"the rendezvous does not answer: {error!r}")
            if count > 0:
                return GenerationEnd(kind="wanted", reason=f"{count} node(s) wait to be admitted")
            if left <= 0:
                break
        return None

    def close(self) -> None:
        self._is_closed.set()
        self._inner.close()


def _read(info: Any) -> tuple[Any, int, int, RendezvousStoreInfo | None]:
    if isinstance(info, tuple):  # what handlers returned before there was a class for it
        store, rank, world_size = info
        return store, rank, world_size, None
    told = info.bootstrap_store_info
    bootstrap = RendezvousStoreInfo(told.master_addr, int(told.master_port)) if told else None
    return info.store, info.rank, info.world_size, bootstrap


def _ours(error: Exception) -> Exception:
    """Return our error of the name that an error of torch's (or one derived from it) has; others as they are."""
    if isinstance(error, RendezvousError):
        return error
    for kind in type(error).__mro__:
        ours = getattr(_interface, kind.__name__, None)
        if isinstance(ours, type) and issubclass(ours, RendezvousError):
            return ours(str(error))
    return error
