"""Running a test function on real processes: forked from a server that has imported torch once.

``run_processes(4, main)`` calls ``main(worker, *args)`` in four processes and returns an ``Outcome`` each. A process
whose function returned stays until every other has returned or ended: who leaves first is a lost peer to one that is
still in its last collective. Processes are ended by their pid whatever happens; a test that outlives ``timeout`` fails
with the stacks of who is left.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "phalanx.comm"])


@dataclass(frozen=True)
class Worker:
    """What a test process knows: who it is, and where the store is."""

    rank: int
    size: int
    store_url: str

    def store(self):
        from phalanx.comm.stores import connect

        return connect(self.store_url)

    def group(self, *, backend: str = "gloo", timeout: float = 60.0, generation: int = 0, **kwargs: Any):
        from phalanx.comm import Group

        return Group.create(
            self.store(),
            kwargs.pop("rank", self.rank),
            kwargs.pop("size", self.size),
            backend=backend,
            timeout=timeout,
            job="test",
            generation=generation,
            **kwargs,
        )


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its return value or the text of its exception, and the exit code (-9: SIGKILL)."""

    rank: int
    exit_code: int | None
    value: Any = None
    error: str = ""


def _main(connection: Connection, stacks: str, worker: Worker, function: Callable[..., Any], args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            connection.send((function(worker, *args), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
        else:
            connection.poll(None)  # until all are done, or nobody is there to say so
        connection.close()
        os._exit(0)  # no teardown: what a rank leaves behind must not depend on luck at interpreter exit


def run_processes(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0, check: bool = True
) -> list[Outcome]:
    """Run ``function(worker, *args)`` on ``size`` processes; with ``check`` an exception in any fails the test."""
    from phalanx.comm.stores import TCPStore

    store = TCPStore.serve()
    with tempfile.TemporaryDirectory() as folder:
        running = Processes(size, function, args, store.address, Path(folder))
        try:
            outcomes = running.collect(timeout)
        finally:
            running.kill()
            store.close()
    failed = [outcome for outcome in outcomes if outcome.error]
    if check and failed:
        raise AssertionError("\n".join(f"rank {o.rank}:\n{o.error}" for o in failed))
    return outcomes


class Processes:
    """The processes of one test."""

    def __init__(self, size: int, function: Callable[..., Any], args: Any, store_url: str, folder: Path) -> None:
        self._folder = folder
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            worker = Worker(rank, size, store_url)
            arguments = (theirs, str(folder / str(rank)), worker, function, args)
            process = _context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def collect(self, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        values: dict[int, tuple[Any, str]] = {}
        awaited = dict(enumerate(self._pipes))
        while awaited:
            ready = wait(list(awaited.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                errors = "\n".join(f"rank {rank}:\n{error}" for rank, (_, error) in values.items() if error)
                raise AssertionError(f"ranks {sorted(awaited)} did not end in {timeout} s\n{errors}\n{self._stacks()}")
            for rank, pipe in list(awaited.items()):
                if pipe in ready:
                    try:
                        values[rank] = pipe.recv()
                    except (EOFError, OSError):  # killed, perhaps with the answer half written
                        values[rank] = (None, "")
                    del awaited[rank]
        for pipe in self._pipes:
            pipe.close()  # all are done: they may go
        for process in self.processes:
            process.join(max(10.0, deadline - time.monotonic()))
        return [Outcome(rank, process.exitcode, *values[rank]) for rank, process in enumerate(self.processes)]

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def _stacks(self) -> str:
        alive = [(rank, process) for rank, process in enumerate(self.processes) if process.is_alive()]
        for _, process in alive:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # the dump is written by a signal handler; there is nothing to wait on
        return "\n".join(f"--- rank {rank}\n{(self._folder / str(rank)).read_text()}" for rank, _ in alive)
