"""Offers key-value stores that the processes of a job share: in memory, over TCP, in a directory, in etcd.

Names are loaded on first use: only the TCP store needs torch.

>>> from phalanx.comm.stores import connect
>>> store = connect("memory://demo")
>>> store.set("host", b"node1")
>>> store.get("host")
b'node1'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.comm.stores._connect import connect as connect
    from phalanx.comm.stores._etcd import EtcdStore as EtcdStore
    from phalanx.comm.stores._file import FileStore as FileStore
    from phalanx.comm.stores._interface import Change as Change
    from phalanx.comm.stores._interface import Lease as Lease
    from phalanx.comm.stores._interface import Store as Store
    from phalanx.comm.stores._interface import Watch as Watch
    from phalanx.comm.stores._memory import MemoryStore as MemoryStore
    from phalanx.comm.stores._sealed import job_store as job_store
    from phalanx.comm.stores._tcp import TCPStore as TCPStore
    from phalanx.comm.stores._torch import wrap_c10d_store as wrap_c10d_store

# Public name -> the module of this package that defines it.
_HOMES = {
    "Change": "_interface",
    "EtcdStore": "_etcd",
    "FileStore": "_file",
    "Lease": "_interface",
    "MemoryStore": "_memory",
    "Store": "_interface",
    "TCPStore": "_tcp",
    "Watch": "_interface",
    "connect": "_connect",
    "job_store": "_sealed",
    "wrap_c10d_store": "_torch",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a checker would take every name from it, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'phalanx.comm.stores' has no attribute {name!r}")
        value = getattr(import_module(f"phalanx.comm.stores.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
