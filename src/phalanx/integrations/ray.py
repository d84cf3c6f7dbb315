"""Runs a job on a Ray cluster: its agents are tasks, as many as the job may have nodes, placed where Ray has room.

A node that Ray adds takes an agent that waited for room, which joins the running job; one that is gone takes its agent
with it, the others go on, and another agent waits for room. Owns the tasks and the rendezvous store, which the driver
serves; what an agent's end means is decided in ``_ray_agents``. Needs the extra ``ray``, on every node.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.comm.stores import TCPStore
from phalanx.integrations._ray_agents import AgentEnd, Agents, JobFailed
from phalanx.protocol import ENV_SECRET_FILE

__all__ = ["JobFailed", "run"]

LEAVE = 60.0
"""Seconds that an agent has to end when its task is cancelled; its workers leave at the end of a step."""
_BOUND = """
import os, signal, sys
from phalanx.launch.system._linux import die_with_parent
if die_with_parent(signal.SIGTERM, int(sys.argv[1])):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Becomes the agent, told to end with the process of its task: Ray may kill that one at any time."""
ENDING = 120.0
"""Seconds that the agents of a job which is over have to end, before their tasks are cancelled."""


def run(
    arguments: Sequence[str],
    *,
    nodes: tuple[int, int],
    cpus: float = 1,
    gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    job: str = "",
    max_losses: int = 1000,
) -> None:
    """Run ``phalanx run ARGUMENTS`` with at least and at most so many ``nodes``; returns when the job is done.

    ``arguments`` are those of ``phalanx run``, without what says where the nodes meet. An agent takes ``cpus``,
    ``gpus`` and ``resources`` of Ray for itself and its workers. Call it on a machine of the cluster (``ray job
    submit``): that one serves the job's store. ``JobFailed`` when the job failed, or more than ``max_losses`` agents
    were lost.

    >>> run(["--on-failure=heal", "train.py"], nodes=(2, 8), cpus=4, gpus=1)          # doctest: +SKIP
    """
    lowest, highest = nodes
    if not 1 <= lowest <= highest:
        raise ValueError(f"nodes is {nodes}; expected (MIN, MAX) with 1 <= MIN <= MAX")
    ray = _load()
    if not ray.is_initialized():
        ray.init()
    address = ray.util.get_node_ip_address()
    with TCPStore.serve(address) as store:
        command = _command(arguments, nodes, store.address.removeprefix("tcp://"), job or f"ray-{secrets.token_hex(4)}")
        secret = _secret()
        begun = ray.remote(num_cpus=0)(_Begun).remote()
        task = ray.remote(
            num_cpus=cpus, num_gpus=gpus, resources=dict(resources or {}), max_retries=0, scheduling_strategy="SPREAD"
        )(_run_agent)
        tasks: dict[Any, int] = {}
        agents = Agents(max_nodes=highest, max_losses=max_losses)
        try:
            while not agents.is_over:
                for _ in range(agents.num_to_start):
                    number = agents.num_lost + len(tasks)
                    tasks[task.remote(number, command, secret, begun)] = number
                agents = agents.started(agents.num_to_start)
                (ended,), _ = ray.wait(list(tasks), num_returns=1)
                del tasks[ended]
                agents = agents.after(_end_of(ray, ended))
            running = set(ray.get(begun.numbers.remote()))
            waiting = [one for one, number in tasks.items() if number not in running]
            _cancel(ray, waiting, force=True)
            _, late = ray.wait([one for one in tasks if one not in waiting], num_returns=len(tasks), timeout=ENDING)
            _cancel(ray, late, force=False)
        except BaseException:
            _cancel(ray, list(tasks), force=False)
            if tasks:
                ray.wait(list(tasks), num_returns=len(tasks), timeout=LEAVE)
            raise
        finally:
            ray.kill(begun)
    if agents.failure:
        raise JobFailed(agents.failure)


def _load() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise RuntimeError(f"the package ray is not installed ({error}): install the extra ray") from error


def _command(arguments: Sequence[str], nodes: tuple[int, int], endpoint: str, job: str) -> list[str]:
    """Return the agent's command line, less the interpreter.

    >>> _command(["train.py"], (2, 4), "10.0.0.1:29400", "ray-1")[:4]
    ['-m', 'phalanx', 'run', '--nnodes=2:4']
    """
    return [
        "-m", "phalanx", "run", f"--nnodes={nodes[0]}:{nodes[1]}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={job}", "--rdzv-conf=is_host=false", *arguments,
    ]  # fmt: skip


def _secret() -> str:
    """Return the secret that the driver was given, or a new one: Ray's network is not for this job alone."""
    given = os.environ.get(ENV_SECRET_FILE)
    return Path(given).read_text() if given else secrets.token_hex(32)


def _end_of(ray: Any, task: Any) -> AgentEnd:
    """Return how the agent of a task that is over ended. What kept it from being started at all is raised."""
    errors = ray.exceptions
    try:
        return AgentEnd(ray.get(task))
    except (errors.RayTaskError, errors.RuntimeEnvSetupError, errors.TaskUnschedulableError):
        raise
    except errors.RayError as error:
        return AgentEnd(None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def _cancel(ray: Any, tasks: Sequence[Any], *, force: bool) -> None:
    for task in tasks:
        ray.cancel(task, force=force)


class _Begun:
    """An actor that knows which agents have begun: Ray does not say which tasks still wait for room."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def note(self, number: int) -> None:
        self._numbers.add(number)

    def numbers(self) -> list[int]:
        return sorted(self._numbers)


def _run_agent(number: int, command: Sequence[str], secret: str, begun: Any) -> int:
    """Run an agent where Ray has put this task, and return its exit code; it never outlives the task's process."""
    _load().get(begun.note.remote(number))
    with tempfile.TemporaryDirectory(prefix="phalanx-ray-") as folder:
        file = Path(folder) / "secret"
        file.write_text(secret)
        file.chmod(0o600)
        agent = subprocess.Popen(
            [sys.executable, "-c", _BOUND, str(os.getpid()), *command],
            env={**os.environ, ENV_SECRET_FILE: str(file)},
        )
        try:
            return agent.wait()
        except BaseException:  # cancelled: Ray raises KeyboardInterrupt in a task
            agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(LEAVE)
            raise
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
