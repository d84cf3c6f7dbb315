"""Lets nodes agree on a generation: parameters, handlers, backends.

>>> from phalanx.launch.rendezvous import RendezvousParameters, get_rendezvous_handler
>>> handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "demo", 1, 1))
>>> info = handler.next_rendezvous()
>>> info.rank, info.world_size, info.generation
(0, 1, 0)
>>> handler.shutdown()
True
"""

from __future__ import annotations

from phalanx.launch.rendezvous._interface import (
    GenerationEnd,
    GenerationHandler,
    GenerationWatch,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from phalanx.launch.rendezvous._registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from phalanx.protocol import NodeInfo

__all__ = [
    "GenerationEnd",
    "GenerationHandler",
    "GenerationWatch",
    "NodeInfo",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]
