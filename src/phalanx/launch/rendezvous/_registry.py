"""Lists the backends there are. One explicit table; others register by a call or by an entry point."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points

from phalanx.launch.rendezvous._backends import (
    create_c10d_handler,
    create_file_handler,
    create_static_handler,
)
from phalanx.launch.rendezvous._etcd_backend import create_etcd_handler, create_etcd_v2_handler
from phalanx.launch.rendezvous._interface import RendezvousHandler, RendezvousParameters
from phalanx.launch.rendezvous._settings import check_settings

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

ENTRY_POINTS = "phalanx.rendezvous"
TORCHS_ENTRY_POINTS = "torchrun.handlers"
"""What packages offer to torchrun: functions that return a creator."""


class RendezvousHandlerRegistry:
    """Backends by name.

    >>> registry = RendezvousHandlerRegistry()
    >>> registry.register("mine", lambda params: ...)     # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Add a backend; ``ValueError`` when another creator has the name."""
        if not backend:
            raise ValueError("a rendezvous backend needs a name")
        if self._creators.get(backend, creator) is not creator:
            raise ValueError(f"the rendezvous backend {backend!r} is registered already, with another creator")
        self._creators[backend] = creator

    def names(self) -> list[str]:
        """Return all names, those of installed packages too."""
        groups = (ENTRY_POINTS, TORCHS_ENTRY_POINTS)
        return sorted({*self._creators, *(entry.name for group in groups for entry in entry_points(group=group))})

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Return the handler for ``params``; ``ValueError`` names the nearest backend when there is none."""
        creator = self._creators.get(params.backend)
        if creator is None:
            for entry in entry_points(group=ENTRY_POINTS, name=params.backend):
                creator = entry.load()
        if creator is None:
            for entry in entry_points(group=TORCHS_ENTRY_POINTS, name=params.backend):
                creator = entry.load()()
        if creator is None:
            near = difflib.get_close_matches(params.backend, self.names(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no rendezvous backend {params.backend!r}; there are {self.names()}{hint}")
        check_settings(params.config, params.backend)
        handler = creator(params)
        missing = [name for name in sorted(RendezvousHandler.__abstractmethods__) if not hasattr(handler, name)]
        if missing:  # asked by what it can do: torch's own base class is as good as ours
            kind = type(handler).__name__
            raise TypeError(f"the backend {params.backend!r} made a {kind}, no RendezvousHandler: no {missing}")
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the backend {params.backend!r} made a handler that calls itself {handler.get_backend()!r}"
            )
        return handler


def _built_in() -> RendezvousHandlerRegistry:
    registry = RendezvousHandlerRegistry()
    registry.register("c10d", create_c10d_handler)
    registry.register("etcd", create_etcd_handler)
    registry.register("etcd-v2", create_etcd_v2_handler)
    registry.register("file", create_file_handler)
    registry.register("static", create_static_handler)
    return registry


rendezvous_handler_registry = _built_in()
"""The one table that the launcher asks."""


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler that ``params.backend`` stands for."""
    return rendezvous_handler_registry.create_handler(params)
