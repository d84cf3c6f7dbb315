"""A value that all workers of a job have alike, before they have formed a group: the first to name one decides.

For what must not differ between workers and cannot wait for the first step: the name of a run's directory, say. It
stays for the whole life of the job, so workers that come later, also after a restart of all, get the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx import protocol
from phalanx.comm import init
from phalanx.comm.stores import connect, job_store
from phalanx.world import World


def write_once(name: str, value: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the job's value of this name: ``value``, if no worker was first with another one.

    Under ``phalanx run`` it is kept in the job's store. Other launchers have none: there all workers call it
    together, and rank 0 decides. A process alone gets its own.

    >>> write_once("run", "2026-11-17", environ={})
    '2026-11-17'
    """
    world = World.from_env(environ)
    url = environ.get(protocol.ENV_STORE)
    if not url:
        return value if world.size == 1 else str(init(default=False).broadcast_value(value, 0))
    root = connect(url)
    try:
        store = job_store(root, environ.get(protocol.ENV_JOB) or world.job)
        key = protocol.value_key(name)
        while (found := store.get(key)) is None:
            store.compare_and_set(key, None, value.encode())
        return found.decode()
    finally:
        root.close()
