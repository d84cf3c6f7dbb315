"""Starts sets of functions or commands with the launcher's own means: zygote, pool, log pump and error files.

Owns the way from ``start_processes``'s arguments to a ``WorkerPool`` and from its exits to a result. Processes end with
the one that started them, however it ends. An end is noticed when it happens; ``period`` is only the latest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.multiprocessing._interface import PContext, RunProcsResult, check_ranks
from phalanx.launch.numa import NumaOptions
from phalanx.launch.telemetry._logs import LogsSpecs
from phalanx.launch.workers._pool import WorkerPool
from phalanx.launch.workers._processes import Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._worker_environment import RankAssignment
from phalanx.launch.workers._worker_handle import WorkerHandle
from phalanx.launch.workers._zygotes import Zygotes, make_zygote


class _ContextPool(WorkerPool):
    """A pool whose lines on the console begin as each process was told."""

    prefixes: Mapping[int, str] = {}

    def _prefix(self, assignment: RankAssignment) -> bytes:
        told = self.prefixes.get(assignment.local_rank)
        return super()._prefix(assignment) if told is None else told.encode()


class _PoolContext(PContext):
    """A set of processes that a pool has started; ``starts`` says what each runs, by local rank."""

    def __init__(self, *args: Any, numa_options: NumaOptions | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numa_options = numa_options
        self._pool: _ContextPool | None = None
        self._pids: dict[int, int] = {}
        self._result: RunProcsResult | None = None
        self._num_running = 0
        """How many ran at the last look."""

    def _starts(self) -> dict[int, WorkerStart]:
        raise NotImplementedError

    def _start(self) -> None:
        if self._pids:
            raise ValueError(f"the processes {self.name!r} are started already")
        starts = self._starts()
        config = LaunchConfig(
            1,
            1,
            nproc_per_node=self.nprocs,
            role=self.name,
            numa_options=self._numa_options,
            duplicate_stdout_filters=self.duplicate_stdout_filters,
            duplicate_stderr_filters=self.duplicate_stderr_filters,
            shutdown_timeout=30.0,
        )
        any_start = starts[0]
        if any_start.copies_caller:
            table = {start.name: (start.entrypoint, start.args) for start in starts.values()}
            zygotes = Zygotes(Zygote.fork(table), is_warm=True)
        else:
            zygotes = Zygotes.of(config, any_start, make_zygote(config, any_start))
        self._pool = pool = _ContextPool(config, any_start, zygotes, lambda worker: None)
        pool.prefixes = self.log_line_prefixes
        pool.open()
        pool.prepare(self.nprocs)
        for rank, start in starts.items():
            env = {name: str(value) for name, value in self.envs[rank].items()}
            worker = pool.start_one(_assignment(rank, self.nprocs), env, self.logs_dest, start)
            self._pids[rank] = worker.process.pid

    def _poll(self) -> RunProcsResult | None:
        if self._result is not None or self._pool is None:
            return self._result
        pool, workers = self._pool, self._workers
        self._num_running = len(pool.running)
        failed = [worker for worker in workers if _has_failed(pool, worker)]
        if not failed and self._num_running:
            return None
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        if failed:
            pool.stop()
            failed += [worker for worker in workers if worker not in failed and self._counts_stopped(worker)]
            result.failures = {worker.assignment.local_rank: pool.failure_of(worker) for worker in failed}
        else:
            result.return_values = {worker.assignment.local_rank: worker.value for worker in workers}
        self._result = result
        self.close()
        return result

    def _counts_stopped(self, worker: WorkerHandle) -> bool:
        """Return whether a process that was stopped because another has failed is a failure too."""
        return False

    @property
    def _workers(self) -> list[WorkerHandle]:
        return list(self._pool.workers.values()) if self._pool else []

    def _pause(self, seconds: float) -> None:
        if self._pool is not None:
            self._pool.wait_for_exit(self._num_running, seconds)

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._pool is None:
            return
        try:
            self._pool.stop(death_sig, timeout)
        finally:
            self._pool.close()
            self._pool = None


class MultiprocessContext(_PoolContext):
    """Processes that run a function."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters, numa_options=numa_options
        )
        self.start_method = start_method

    def _starts(self) -> dict[int, WorkerStart]:
        assert not isinstance(self.entrypoint, str), "commands are SubprocessContext's"
        method = WorkerStart.choose(self.entrypoint, self.args[0], self.start_method).method
        starts = {}
        for rank in range(self.nprocs):
            starts[rank] = WorkerStart(entrypoint=self.entrypoint, args=self.args[rank], method=method, name=str(rank))
            starts[rank].check()
        return starts


class SubprocessContext(_PoolContext):
    """Processes that run a command."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters, numa_options=numa_options
        )

    def _starts(self) -> dict[int, WorkerStart]:
        return {
            rank: WorkerStart(entrypoint=self.entrypoint, args=tuple(self.args[rank]), method="exec")
            for rank in range(self.nprocs)
        }

    def _counts_stopped(self, worker: WorkerHandle) -> bool:
        return not worker.has_succeeded


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start one process for each entry of ``args``, which is for each local rank from 0 on, as ``envs`` is.

    A function's value and its error come back by ``wait``; a command's arguments are written as text.
    """
    check_ranks(args, len(args), "args")
    check_ranks(envs, len(args), "envs")
    common: dict[str, Any] = {
        "name": name,
        "args": args,
        "envs": envs,
        "logs_specs": logs_specs,
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
    }
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(entrypoint=entrypoint, **common)
    else:
        context = MultiprocessContext(entrypoint=entrypoint, start_method=start_method, **common)
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context


def _assignment(rank: int, count: int) -> RankAssignment:
    """Return the place of a process that is in no job: only its number is one."""
    return RankAssignment(
        worker_id=str(rank),
        rank=rank,
        local_rank=rank,
        world_size=count,
        local_size=count,
        node_rank=0,
        num_nodes=1,
        generation=0,
        master_addr="",
        master_port=0,
        store_url="",
        role_rank=rank,
        role_size=count,
    )


def _has_failed(pool: WorkerPool, worker: WorkerHandle) -> bool:
    if worker.is_running:
        return False
    return not (worker.has_succeeded and pool.fetch_value(worker))
