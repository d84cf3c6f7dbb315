"""Makes the environment of a worker: a pure function of its assignment, its job and the configuration.

Owns the names that torchrun's users rely on and, with ``phalanx.protocol``, those of our own. What it returns is
laid over the environment that the agent was started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx import _drop_in, protocol
from phalanx.launch.config._config import LaunchConfig
from phalanx.protocol import timeouts


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """Says where one worker stands in one generation."""

    worker_id: str
    rank: int
    local_rank: int
    world_size: int
    local_size: int
    node_rank: int
    num_nodes: int
    generation: int
    master_addr: str
    master_port: int
    store_url: str
    role_rank: int
    role_size: int
    """Among the workers of the same role: other nodes may run another one."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Holds what only the rendezvous knows about the job that workers are started for."""

    run_id: str
    restarts: int
    secret_file: str = ""
    job: str = ""
    """The name of its records in the store; empty: the run id."""
    regroup_timeout: float = timeouts.regroup_timeout()
    """Seconds that a worker waits for its place in the next group."""


def worker_environment(
    assignment: RankAssignment, job: JobFacts, config: LaunchConfig, outer: Mapping[str, str]
) -> dict[str, str]:
    """Return all variables that the launcher sets for a worker. ``outer`` is the agent's own environment."""
    env = {
        "RANK": assignment.rank,
        "LOCAL_RANK": assignment.local_rank,
        "GROUP_RANK": assignment.node_rank,
        "ROLE_RANK": assignment.role_rank,
        "ROLE_NAME": config.role,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": assignment.local_size,
        "GROUP_WORLD_SIZE": assignment.num_nodes,
        "ROLE_WORLD_SIZE": assignment.role_size,
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": assignment.master_port,
        "TORCHELASTIC_RESTART_COUNT": job.restarts,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": outer.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        protocol.ENV_STORE: assignment.store_url,
        protocol.ENV_JOB: job.job or job.run_id,
        protocol.ENV_GENERATION: assignment.generation,
        protocol.ENV_WORKER_ID: assignment.worker_id,
        protocol.ENV_ON_FAILURE: config.on_failure,
        protocol.ENV_LEAVE_SIGNAL: config.leave_signal,
        protocol.ENV_REGROUP_TIMEOUT: job.regroup_timeout,
        **thread_defaults(assignment.local_size, outer),
    }
    if config.drop_in:
        env[_drop_in.VARIABLE] = ",".join(config.drop_in)
    if job.secret_file:
        env[protocol.ENV_SECRET_FILE] = job.secret_file
        env[protocol.ENV_SECRET] = ""  # the file was named for this job; the variable may be another one's
    if config.virtual_local_rank:
        env["LOCAL_RANK"] = 0
        env["CUDA_VISIBLE_DEVICES"] = _own_device(assignment.local_rank, outer.get("CUDA_VISIBLE_DEVICES"))
    return {name: str(value) for name, value in env.items()}


def resolver_defaults(outer: Mapping[str, str]) -> dict[str, str]:
    """Retry a name server after one second, five times, instead of after five seconds, twice.

    torch's TCPStore asks the name server for the name of every address it connects to, 127.0.0.1 included, only to be
    able to log it. One lost packet then costs five seconds: the rare slow starts that look like a hang.
    """
    return {} if "RES_OPTIONS" in outer else {"RES_OPTIONS": "timeout:1 attempts:5"}


def thread_defaults(local_size: int, outer: Mapping[str, str]) -> dict[str, str]:
    """Set one computing thread per worker when several share a machine and nobody said otherwise."""
    if local_size > 1 and "OMP_NUM_THREADS" not in outer:
        return {"OMP_NUM_THREADS": "1"}
    return {}


def _own_device(local_rank: int, visible: str | None) -> str:
    if not visible:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise ValueError(
            f"local rank {local_rank} has no device: CUDA_VISIBLE_DEVICES={visible} lists {len(devices)}; "
            "start fewer workers per node or list more devices"
        )
    return devices[local_rank]
