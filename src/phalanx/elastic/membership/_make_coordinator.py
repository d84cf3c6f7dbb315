"""Makes the coordinator of a job for where this process runs: under agents that heal, or among workers that stay."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx import protocol
from phalanx.comm import Group, init
from phalanx.comm.stores import connect, job_store
from phalanx.elastic.membership._committed_steps import CommittedSteps
from phalanx.elastic.membership._coordinator import Coordinator, FixedCoordinator
from phalanx.elastic.membership._store_coordinator import StoreCoordinator
from phalanx.protocol import JobKeys, timeouts
from phalanx.world import World


def make_coordinator(
    group: Group | None, environ: Mapping[str, str] = os.environ, *, comm_timeout: float
) -> Coordinator:
    """Return the coordinator for where this process runs."""
    world = World.from_env(environ)
    worker_id = environ.get(protocol.ENV_WORKER_ID) or f"rank{group.rank if group else world.rank}"
    if group is not None:
        return FixedCoordinator(group, worker_id)
    url = environ.get(protocol.ENV_STORE)
    if not url:
        return FixedCoordinator(init(default=False) if world.size > 1 else None, worker_id)
    job = environ.get(protocol.ENV_JOB) or world.job
    keys = JobKeys(len(_made))
    if environ.get(protocol.ENV_ON_FAILURE) != "heal":
        _made.append(None)
        committed_steps = CommittedSteps(job_store(connect(url), job) if world.rank == 0 else None, keys)
        return FixedCoordinator(init(default=False) if world.size > 1 else None, worker_id, committed_steps)
    newest = max([world.generation, *(before.newest_generation for before in _made if before is not None)])
    given = environ.get(protocol.ENV_REGROUP_TIMEOUT)
    coordinator = StoreCoordinator(
        connect(url),
        job,
        worker_id,
        newest,
        timeout=float(given) if given else timeouts.regroup_timeout(),
        comm_timeout=comm_timeout,
        keys=keys,
    )
    _made.append(coordinator)
    return coordinator


_made: list[StoreCoordinator | None] = []
"""The coordinators of the jobs that this process has made so far: a job's number is the same in all workers."""
