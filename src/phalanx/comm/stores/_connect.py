"""Opens the store that a URL names."""

from __future__ import annotations

import threading
import weakref
from urllib.parse import unquote, urlsplit

from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._memory import MemoryStore, _Map

# The one place where a name stands for a map: ``memory://name`` means the same store in every thread.
_named: weakref.WeakValueDictionary[str, _Map] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def connect(url: str, timeout: float = 30.0) -> Store:
    """Return a client of the store at ``url``; ``StoreLost`` when it cannot be reached within ``timeout`` seconds.

    >>> connect("memory://demo").add("n")
    1

    ``memory://name`` (this process), ``tcp://host:port``, ``file:///directory``,
    ``etcd://host:port[,host:port...]``, and ``etcds://`` for TLS (see ``_etcd_access`` for users and certificates).
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return _named_memory(parts.netloc + parts.path)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        from phalanx.comm.stores._tcp import TCPStore  # start-up: it imports torch

        return TCPStore(parts.hostname, parts.port, timeout=timeout)
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        from phalanx.comm.stores._file import FileStore  # start-up: only what is used

        return FileStore(unquote(parts.path), timeout=timeout)
    if parts.scheme in ("etcd", "etcds") and parts.netloc:
        # start-up: only what is used
        from phalanx.comm.stores._etcd import EtcdStore
        from phalanx.comm.stores._etcd_access import parse_etcd_url

        endpoints, access = parse_etcd_url(url)
        return EtcdStore(endpoints, access=access, timeout=timeout)
    raise ValueError(
        f"not the address of a store: {url!r}; expected memory://name, tcp://host:port, file:///directory, "
        "etcd://host:port[,host:port...] or etcds://... for TLS"
    )


def _named_memory(name: str) -> MemoryStore:
    with _lock:
        store = MemoryStore(name)
        store._map = _named.setdefault(name, store._map)
        return store
