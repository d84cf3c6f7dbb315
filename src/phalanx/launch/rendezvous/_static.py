"""The ``static`` backend: every node was told its rank; nothing is elected but the moment to start.

Owns the reading of ``rank`` and the one-node case, which serves on loopback because nobody else will come.
Everything else is the common handler with fixed ranks and min = max, so restarts, leases and closing work as
everywhere.
"""

from __future__ import annotations

from phalanx.launch.rendezvous._backends import make_handler, open_tcp, split_endpoint
from phalanx.launch.rendezvous._handler import StoreRendezvousHandler
from phalanx.launch.rendezvous._interface import RendezvousParameters

DEFAULT_PORT = 29500


def create_static_handler(params: RendezvousParameters) -> StoreRendezvousHandler:
    """Rank 0 serves the store at the endpoint; ``rank`` is this node's. A single node takes the endpoint's
    port for its workers, as with torchrun; several share it for the rendezvous and the workers' port is
    chosen."""
    if params.min_nodes != params.max_nodes:
        raise ValueError(
            f"the static rendezvous has a fixed number of nodes; got {params.min_nodes}:{params.max_nodes}"
        )
    rank = params.get_as_int("rank", 0 if params.max_nodes == 1 else None)
    if rank is None:
        raise ValueError("the static rendezvous needs the rank of this node: --node-rank")
    if not 0 <= rank < params.max_nodes:
        raise ValueError(f"node rank {rank} is outside [0, {params.max_nodes})")
    host, port = split_endpoint(params.endpoint, DEFAULT_PORT)
    timeout = params.get_as_float("timeout", 600.0)
    if params.max_nodes == 1:
        opened = open_tcp("localhost", 0, serve=True, timeout=timeout)
        handler = make_handler(params, opened, loopback=True, fixed_rank=0)
        handler.set_bootstrap_port(port or None)
        return handler
    opened = open_tcp(host, port, serve=rank == 0, timeout=timeout)
    return make_handler(params, opened, loopback=host in ("localhost", "127.0.0.1"), fixed_rank=rank)
