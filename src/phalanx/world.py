"""Says who this process is among the workers: one immutable value, read from the environment in one place.

Owns the environment contract between launcher and worker. Does not talk to anyone.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of one worker in one generation of a job.

    >>> World(rank=1, size=4).is_first
    False
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    job: str = "local"
    generation: int = 0
    restart_count: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"world size is {self.size}; expected at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside [0, {self.size})")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the variables that a launcher sets, or those of MPI; a process started by hand is a world of one.

        >>> World.from_env({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}).rank
        2
        """
        given = os.environ if environ is None else environ
        env = {**mpi_variables(given), **given}

        def number(name: str, default: int) -> int:
            text = env.get(name, "")
            if not text:
                return default
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r}; expected an integer") from None

        size = number("WORLD_SIZE", 1)
        return cls(
            rank=number("RANK", 0),
            size=size,
            local_rank=number("LOCAL_RANK", 0),
            local_size=number("LOCAL_WORLD_SIZE", size),
            node_rank=number("GROUP_RANK", 0),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
            job=env.get("TORCHELASTIC_RUN_ID", "") or "local",
            generation=number("PHALANX_GENERATION", 0),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
        )


_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""What Open MPI, MVAPICH and the family of MPICH (Intel's too) call rank, size, local rank and local size."""
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""What tells two jobs of the same user apart, the same in all processes of one."""
FIRST_PORT, NUM_PORTS = 15000, 15000
"""Below those that systems give out by themselves."""


def mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ``mpirun`` has told this process, under the names that launchers of torch use.

    Nothing where RANK or WORLD_SIZE is set: another launcher stands between mpirun and this process. Where all
    processes are on one host, the place to meet is known too; else it is for MASTER_ADDR and MASTER_PORT to say.

    >>> mpi_variables({"PMI_RANK": "1", "PMI_SIZE": "4"})["WORLD_SIZE"]
    '4'
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return {}
    names = next((names for names in _MPI if all(environ.get(name) for name in names[:2])), None)
    if names is None:
        return {}
    wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {ours: environ[theirs] for ours, theirs in zip(wanted, names, strict=True) if environ.get(theirs)}
    job = next((environ[name] for name in _MPI_JOB if environ.get(name)), "")
    found["TORCHELASTIC_RUN_ID"] = f"mpi-{job or 'job'}"
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"] and job:
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(found["TORCHELASTIC_RUN_ID"]))}
    return found


def port_of(job: str) -> int:
    """Return a port that all processes of a job compute alike, and those of another job most likely do not.

    >>> FIRST_PORT <= port_of("slurm-17.0.0") < FIRST_PORT + NUM_PORTS
    True
    """
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def launched_local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the local rank that a launcher has given this process; None: there was no launcher.

    >>> launched_local_rank({"LOCAL_RANK": "3"}), launched_local_rank({})
    (3, None)
    """
    env = os.environ if environ is None else environ
    return World.from_env({**env, "RANK": "0", "WORLD_SIZE": "1"}).local_rank if env.get("LOCAL_RANK") else None
