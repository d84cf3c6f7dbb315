"""Finds out from the environment what a scheduler has given a job: how many agents, which of them serves, the job's id.

Pure: from variables to a ``NodeAllocation``. Slurm (``srun phalanx run``), MPI (``mpirun phalanx run``) and indexed
jobs of Kubernetes are known. Nothing is looked up and nobody is asked; what the variables do not say is an error that
says how to say it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.launch.rendezvous._hostlist import expand_counts, expand_hosts
from phalanx.world import mpi_variables, port_of

SCHEDULERS = ("slurm", "mpi", "kubernetes")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class NodeAllocation:
    """What a scheduler has said about this job, in the words of ``phalanx run``."""

    scheduler: str
    num_agents: int
    """One for each task that the scheduler has started."""
    host: str
    """Where the store is served."""
    port: int
    job: str
    serves: bool
    """Whether this agent is on that host."""

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_allocation(scheduler: str, environ: Mapping[str, str] | None = None) -> NodeAllocation | None:
    """Return what the named scheduler says; ``auto``: the first one that says anything, None where none does.

    ``ValueError`` where a scheduler is named whose variables are not there, or do not say enough.

    >>> find_allocation("auto", {}) is None
    True
    """
    env = os.environ if environ is None else environ
    readers = {"slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes}
    if scheduler != AUTO:
        return readers[scheduler](env)
    marks = {"slurm": "SLURM_PROCID", "kubernetes": "JOB_COMPLETION_INDEX"}
    for name, mark in marks.items():
        if env.get(mark):
            return readers[name](env)
    return _mpi(env) if mpi_variables(env) else None


def _slurm(env: Mapping[str, str]) -> NodeAllocation:
    """Read what ``srun`` tells each task. A requeued job is another run: its id has the number of its starts."""
    hosts = expand_hosts(_need(env, "slurm", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    job = _need(env, "slurm", "SLURM_JOB_ID", "SLURM_JOBID")
    counts = expand_counts(_need(env, "slurm", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise ValueError(
            f"Slurm says that there are {len(hosts)} hosts ({', '.join(hosts[:3])}...) and gives task counts for "
            f"{len(counts)}; start `phalanx run` with srun, not from the batch script itself"
        )
    name = f"slurm-{job}.{env.get('SLURM_STEP_ID', '0')}.{env.get('SLURM_RESTART_COUNT', '0')}"
    first = hosts[counts.index(next(count for count in counts if count))] if any(counts) else hosts[0]
    here = env.get("SLURMD_NODENAME", "")
    return NodeAllocation(
        scheduler="slurm",
        num_agents=sum(counts),
        host=first,
        port=port_of(name),
        job=name,
        serves=here == first if here else _number(env, "slurm", "SLURM_NODEID") == 0,
    )


def _mpi(env: Mapping[str, str]) -> NodeAllocation:
    """Read what ``mpirun`` tells each process. Where rank 0 is, MPI keeps to itself, unless all are on one host."""
    told = mpi_variables(env)
    if not told:
        raise ValueError(
            "--rdzv-backend mpi: no variables of Open MPI (OMPI_COMM_WORLD_RANK), MPICH or Intel MPI (PMI_RANK) are "
            "set; was phalanx run started by mpirun?"
        )
    host, size, rank = env.get("MASTER_ADDR") or told.get("MASTER_ADDR"), int(told["WORLD_SIZE"]), int(told["RANK"])
    if not host:
        raise ValueError(
            f"mpirun has started {size} processes on several hosts and does not say where rank 0 is; give it: mpirun "
            "-x MASTER_ADDR=HOST (Intel MPI and MPICH: -genv MASTER_ADDR HOST), HOST being that of rank 0"
        )
    name = told["TORCHELASTIC_RUN_ID"]
    port = env.get("MASTER_PORT") or str(port_of(name))
    if not port.isdecimal():
        raise ValueError(f"environment variable MASTER_PORT={port!r}; expected a port")
    return NodeAllocation(scheduler="mpi", num_agents=size, host=host, port=int(port), job=name, serves=rank == 0)


def _kubernetes(env: Mapping[str, str]) -> NodeAllocation:
    """Read an indexed Job's variables: the index from Kubernetes, the others from the manifest (docs/howto)."""
    index = _number(env, "kubernetes", "JOB_COMPLETION_INDEX")
    num_pods = _number(env, "kubernetes", "PHALANX_NUM_PODS")
    name, service = (_need(env, "kubernetes", key) for key in ("PHALANX_JOB_NAME", "PHALANX_SERVICE"))
    return NodeAllocation(
        scheduler="kubernetes",
        num_agents=num_pods,
        host=f"{name}-0.{service}",
        port=29400,
        job=name,
        serves=index == 0,
    )


def _need(env: Mapping[str, str], scheduler: str, *names: str) -> str:
    for name in names:
        if env.get(name):
            return env[name]
    how = {
        "slurm": "was phalanx run started by srun?",
        "kubernetes": "see examples/kubernetes for how the manifest sets it",
    }[scheduler]
    raise ValueError(f"--rdzv-backend {scheduler}: {' or '.join(names)} is not set; {how}")


def _number(env: Mapping[str, str], scheduler: str, name: str) -> int:
    text = _need(env, scheduler, name)
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"environment variable {name}={text!r}; expected a number")
    return int(text)
