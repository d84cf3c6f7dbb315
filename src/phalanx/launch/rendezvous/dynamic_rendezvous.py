"""Forms generations through a ``RendezvousBackend`` of one's own: torch's names, our rendezvous.

Owns ``DynamicRendezvousHandler`` and ``create_handler``. The record that the backend keeps is in our format: all nodes
of a job must be ours. The backend's ``get_state`` and ``set_state`` carry everything; the c10d store is handed out with
each generation, under a prefix of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from phalanx.comm.stores._torch import prefixed
from phalanx.launch.rendezvous._backend_store import BackendStore
from phalanx.launch.rendezvous._backends import OpenStore, make_handler
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousHandler, RendezvousInfo, RendezvousParameters
from phalanx.launch.rendezvous._torch_settings import (
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    Token,
)

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]


class DynamicRendezvousHandler(RendezvousHandler):
    """A handler on a backend of one's own. Made by ``from_backend``."""

    def __init__(
        self, settings: RendezvousSettings, backend_name: str, store: Any, members: StoreRendezvousHandler
    ) -> None:
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._members = members

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """Make the handler of this node. ``store``: a c10d store that all nodes share."""
        if not run_id:
            raise ValueError("the run id is empty; expected the name of the job, the same on all nodes")
        timeout = timeout or RendezvousTimeout()
        interval = timedelta(seconds=keep_alive_interval)
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, keep_alive_max_attempt)
        params = RendezvousParameters(
            backend.name,
            "",
            run_id,
            min_nodes,
            max_nodes,
            local_addr,
            keep_alive_interval=keep_alive_interval,
            keep_alive_max_attempt=keep_alive_max_attempt,
            **{f"{name}_timeout": _seconds(timeout, name) for name in ("join", "last_call", "close")},
        )
        members = make_handler(params, OpenStore(store=BackendStore(backend), url=""))
        return cls(settings, backend.name, store, members)

    @property
    def settings(self) -> RendezvousSettings:
        """What the rendezvous was made with."""
        return self._settings

    def get_backend(self) -> str:
        return self._backend_name

    def get_run_id(self) -> str:
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._members.next_rendezvous()
        store = prefixed(self._store, f"{self.get_run_id()}/{found.generation}")
        return RendezvousInfo(store, found.rank, found.world_size, found.bootstrap_store_info)

    def is_closed(self) -> bool:
        return self._members.is_closed()

    def set_closed(self) -> None:
        self._members.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._members.num_nodes_waiting()

    def shutdown(self) -> bool:
        """Close the rendezvous for all, as torch's does, and leave it."""
        self._members.set_closed()
        return self._members.shutdown()


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Make the handler that ``params`` describe: ``join_timeout``, ``last_call_timeout``, ``close_timeout``,
    ``heartbeat_timeout``, ``keep_alive_interval``, ``keep_alive_max_attempt``, in seconds."""

    def told(name: str) -> timedelta | None:
        seconds = params.get_as_int(f"{name}_timeout")
        return None if seconds is None else timedelta(seconds=seconds)

    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(told("join"), told("last_call"), told("close"), told("heartbeat")),
        params.get_as_int("keep_alive_interval", 5) or 5,
        params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )


def _seconds(timeout: RendezvousTimeout, name: str) -> float:
    value: timedelta = getattr(timeout, name)
    return value.total_seconds()
