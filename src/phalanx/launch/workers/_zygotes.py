"""Starts the zygote of a pool, and its successors should it be killed: workers outlive it, new ones can be started.

Owns which zygote forks the next worker. When one is lost, two are started: one that imports nothing, from which workers
are exec'd meanwhile, and one that imports what the lost one had, which takes over when it is done. A zygote that was
forked from the agent's own memory (functions by ``fork``) has no successor: the agent has threads by then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from phalanx._drop_in import modules_of
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.system import _linux
from phalanx.launch.workers._processes import ProcessStartError, WorkerProcess, Zygote
from phalanx.launch.workers._start import WorkerStart
from phalanx.launch.workers._worker_environment import thread_defaults

log = logging.getLogger(__name__)

WARM_IMPORTS = ("torch", "torch.distributed")
"""What a warm zygote imports before anything else."""

MAX_ATTEMPTS = 5
"""How many zygotes in a row may be lost before one of them has forked the worker that is wanted."""


class Zygotes:
    """Holds a zygote and its successors. ``make(is_warm)`` starts one; None: there is none."""

    @classmethod
    def of(cls, config: LaunchConfig, start: WorkerStart, first: Zygote) -> Zygotes:
        """Begin with ``first``; others follow it, but for functions that were forked with the caller's memory."""
        if start.copies_caller:
            return cls(first, is_warm=start.is_warm)
        return cls(
            first,
            lambda is_warm: make_zygote(config, start if is_warm else start.cold()),
            is_warm=start.is_warm,
        )

    def __init__(self, first: Zygote, make: Callable[[bool], Zygote] | None = None, *, is_warm: bool = False) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._warm: Zygote | None = first if is_warm else None
        self._cold: Zygote | None = None if is_warm else first
        self._all = [first]
        self._on_exit: Callable[[WorkerProcess], None] = lambda process: None
        self._is_closed = False
        self._was_adopting = True

    def start(self, on_exit: Callable[[WorkerProcess], None]) -> None:
        """Begin to listen, and wait until the first one has imported everything."""
        self._on_exit = on_exit
        self._was_adopting = _linux.adopts_orphans()
        _linux.adopt_orphans()  # workers whose zygote is killed become this process's children
        (first,) = self._all
        first.start(on_exit, self._on_gone)
        first.wait_ready()

    def park(self) -> tuple[WorkerProcess, bool]:
        """Fork a new process that waits for its order, and whether it has what the first zygote had imported."""
        for _ in range(MAX_ATTEMPTS):
            zygote, is_warm = self._next()
            try:
                if not is_warm:
                    zygote.wait_ready()
                return zygote.park(), is_warm
            except ProcessStartError:
                if self._make is None or not zygote.is_gone:
                    raise
                self._on_gone(zygote)  # maybe its end was not noticed yet
        raise ProcessStartError(f"{MAX_ATTEMPTS} zygotes in a row were killed; no worker can be started")

    @property
    def is_idle(self) -> bool:
        """Whether the best zygote has imported all that it wants to, so that a fork has it and comes at once."""
        with self._lock:
            best = self._warm or self._cold
            return best is not None and best.is_idle

    def _next(self) -> tuple[Zygote, bool]:
        with self._lock:
            if self._warm is not None and (self._warm.is_ready or self._make is None):
                return self._warm, True
            found = self._cold or self._warm
        if found is None:
            raise ProcessStartError("the zygote is gone; no worker can be started")
        return found, found is not self._cold

    def _on_gone(self, zygote: Zygote) -> None:
        """Called in the reader thread of the one that is gone, and by who noticed before it; only the first counts."""
        with self._lock:
            if self._is_closed or self._make is None or zygote not in (self._warm, self._cold):
                return
            log.error(
                "the zygote (pid %d), which starts the workers, was killed; its workers go on, and another is started",
                zygote.pid,
            )
            if zygote is self._cold:
                self._cold = None
            if zygote is self._warm:
                self._warm = self._begin(is_warm=True)
            if self._cold is None:
                self._cold = self._begin(is_warm=False)

    def _begin(self, *, is_warm: bool) -> Zygote:
        assert self._make is not None, "asked before"
        zygote = self._make(is_warm)
        self._all.append(zygote)
        zygote.start(self._on_exit, self._on_gone)
        return zygote

    def close(self) -> None:
        """Kill every process that is left and end all zygotes. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for zygote in self._all:
            zygote.close()
        if not self._was_adopting:
            _linux.adopt_orphans(False)


def make_zygote(config: LaunchConfig, start: WorkerStart) -> Zygote:
    """Start the zygote that workers need. Only ``fork`` copies this process; others start from a clean interpreter."""
    if start.copies_caller:
        return Zygote.fork({"main": (start.entrypoint, start.args)}, config.preload)
    env = {**os.environ, **thread_defaults(config.nproc_per_node, os.environ)}
    return Zygote.execute(warm_imports(config) if start.is_warm else (), env)


def warm_imports(config: LaunchConfig) -> tuple[str, ...]:
    """Return what a warm zygote imports for scripts: also ours, where they take the place of torch's names."""
    return (*WARM_IMPORTS, *config.preload, *modules_of(config.drop_in))
