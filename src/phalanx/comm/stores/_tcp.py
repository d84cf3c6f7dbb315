"""Keeps a store on torch's TCPStore: one server process, clients anywhere.

Owns hosting a server (bound to one address, with the thread that ends leases) and connecting to it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore as NativeStore  # torch.distributed's, with its stub

from phalanx.comm.stores._torch import TorchStore
from phalanx.comm.stores._torch_lease import Reaper
from phalanx.comm.stores._torch_link import bound_replies, connect_link, mark_server


class TCPStore(TorchStore):
    """A client of the server at ``host:port``; ``TCPStore.serve()`` starts a server.

    >>> server = TCPStore.serve()                      # doctest: +SKIP
    >>> connect(server.address).add("joined")          # doctest: +SKIP
    1
    """

    def __init__(self, host: str, port: int, *, timeout: float = 30.0) -> None:
        """Connect within ``timeout`` seconds, else ``StoreLost``."""
        super().__init__(connect_link(host, port, timeout=timeout))
        self._server: NativeStore | None = None
        self._reaper: Reaper | None = None

    @classmethod
    def serve(cls, host: str = "127.0.0.1", port: int = 0) -> TCPStore:
        """Host a server in this process and return a client of it; ``close()`` ends the server too.

        Bound to ``host`` alone (torch by itself would listen on every interface). Starts threads: fork
        before it.
        """
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
        port = listener.getsockname()[1]
        native = NativeStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        mark_server(native)
        bound_replies(port)
        store = cls(host, port)
        store._server = native
        store._reaper = Reaper(store._link.fork())
        return store

    def close(self) -> None:
        super().close()
        if self._reaper is not None:
            self._reaper.close()
        self._server = self._reaper = None
