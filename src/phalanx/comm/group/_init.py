"""Joins the job that this process was started for, and finds the group that code without one should use.

Owns ``init`` (reads the environment through ``World`` and ``membership``) and ``current_group``.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from phalanx.comm.group import _context
from phalanx.comm.group._group import Group
from phalanx.comm.stores import MemoryStore, Store, TCPStore, connect
from phalanx.comm.stores._sealed import signed_store
from phalanx.comm.transports._interface import DEFAULT_TIMEOUT
from phalanx.protocol import ENV_STORE
from phalanx.world import World, mpi_variables


def init(*, backend: str = "auto", timeout: float | timedelta = DEFAULT_TIMEOUT, default: bool = True) -> Group:
    """Join the group of this worker's generation and make it the current one.

    Reads what a launcher sets (``phalanx run``, torchrun, or by hand: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or
    ``mpirun``, which needs MASTER_ADDR and MASTER_PORT beside it only where its processes are on several hosts.
    A process that was started alone gets a group of one. With ``default`` it also becomes torch's default process
    group, so that ``torch.distributed`` calls work.

    >>> group = phalanx.init()                     # doctest: +SKIP
    """
    world = World.from_env()
    group = Group.create(
        _store(world),
        world.rank,
        world.size,
        backend=backend,
        timeout=timeout,
        job=world.job,
        generation=world.generation,
    )
    if default and not dist.is_initialized():
        group.make_default()
    _context.set_group(group)
    return group


def _store(world: World) -> Store:
    url = os.environ.get(ENV_STORE)
    if url:
        return signed_store(connect(url), world.job)
    if world.size == 1:
        return MemoryStore()
    told = {**mpi_variables(os.environ), **os.environ}
    host, port = told.get("MASTER_ADDR"), told.get("MASTER_PORT")
    if not host or not port:
        raise RuntimeError(
            f"rank {world.rank} of {world.size}: neither {ENV_STORE} nor MASTER_ADDR and MASTER_PORT are set; "
            f"start the script with `phalanx run`, or set them"
        )
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if world.rank == 0 and not agent_has_store:
        return TCPStore.serve(host, int(port))
    return connect(f"tcp://{host}:{port}")


class NoCurrentGroup(RuntimeError):
    """Nobody has said which group to use."""


def joined_group() -> Group:
    """Return the current group; without one, join what the environment names, as a mesh of torch's does.

    ``ValueError`` if it names nothing: the process was not started by a launcher.
    """
    try:
        return current_group()
    except NoCurrentGroup:
        if _context.rank_token() is not None:
            raise
    told = {**mpi_variables(os.environ), **os.environ}
    where = () if told.get(ENV_STORE) else ("MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in ("RANK", "WORLD_SIZE", *where) if not told.get(name)]
    if missing:
        raise ValueError(
            f"there is no current group, and the environment does not name one: {', '.join(missing)} not set; "
            f"start the script with `phalanx run` or torchrun, or call phalanx.init() for a group of one"
        )
    return init()


def has_current_group() -> bool:
    """Return whether ``current_group`` finds one."""
    return _context.registered_group() is not None or (_context.rank_token() is None and dist.is_initialized())


def current_group() -> Group:
    """Return the group that code without one should use: set by ``init`` or ``use_group``, else torch's default
    group."""
    group = _context.registered_group()
    if group is not None:
        return group
    if _context.rank_token() is None and dist.is_initialized():
        assert dist.group.WORLD is not None, "torch says that it has a default group"
        return Group.wrap(dist.group.WORLD)
    raise NoCurrentGroup(
        "there is no current group: call phalanx.init() in the worker first "
        "(or torch.distributed.init_process_group(), or use_group())"
    )
