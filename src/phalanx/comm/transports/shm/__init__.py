"""Collectives among processes of one host, at memory speed. ``ShmTransport.create`` is the door.

Read in this order: ``_layout`` (what lies where, which flag means what), ``_syscalls`` (memory ordering), ``_engine``
(who runs what, waiting), ``_window`` and ``_collectives`` (how bytes move), ``_join`` (how a group forms).
"""

from __future__ import annotations

from phalanx.comm.transports.shm._join import ShmUnavailable, trial
from phalanx.comm.transports.shm._transport import ShmTransport

__all__ = ["ShmTransport", "ShmUnavailable", "trial"]
