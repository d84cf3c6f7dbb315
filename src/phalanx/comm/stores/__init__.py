"""Key-value stores that the processes of a job share: in memory, over TCP, in a directory, in etcd.

>>> from phalanx.comm.stores import connect
>>> store = connect("memory://demo")
>>> store.set("host", b"node1")
>>> store.get("host")
b'node1'
"""

from __future__ import annotations

from phalanx.comm.stores._connect import connect
from phalanx.comm.stores._etcd import EtcdStore
from phalanx.comm.stores._file import FileStore
from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.comm.stores._memory import MemoryStore
from phalanx.comm.stores._sealed import job_store
from phalanx.comm.stores._tcp import TCPStore
from phalanx.comm.stores._torch import wrap_c10d_store

__all__ = [
    "Change",
    "EtcdStore",
    "FileStore",
    "Lease",
    "MemoryStore",
    "Store",
    "TCPStore",
    "Watch",
    "connect",
    "job_store",
    "wrap_c10d_store",
]
