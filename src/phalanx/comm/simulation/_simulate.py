"""Runs a function on N ranks in threads of one process, with the interface of real ones.

Owns the threads of a simulation and what ``run`` reports. No sockets, no processes; deterministic (see
``_scheduler``). It is for tests and for trying out layouts on a laptop, not for speed.

Invariant: no rank outlives ``run``, however that ends; only one that never comes to a collective can, which is said.
Ranks and their caller have one process, with one default random generator: one that went on would change the numbers
of whatever the process does next.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from phalanx.comm.group import _context
from phalanx.comm.group._group import Group
from phalanx.comm.simulation import _profilers
from phalanx.comm.simulation._scheduler import Released, Scheduler, SimulatedDeath
from phalanx.comm.simulation._threads import Board, ThreadTransport
from phalanx.errors import RankFailed, SimulationError

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 30.0
"""How long, in seconds, ``run`` waits for the ranks of a simulation that it gives up."""


class Simulation:
    """A number of ranks to run functions on; made by ``simulate``."""

    def __init__(self, world_size: int, *, timeout: float = 100.0) -> None:
        if world_size < 1:
            raise ValueError(f"simulate({world_size}); expected at least one rank")
        self.world_size = world_size
        self.timeout = timeout

    def run(self, function: Callable[Concatenate[Group, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call ``function(group, *args)`` on every rank and return the results in the order of the ranks.

        Inside, ``current_group()`` is the rank's group. A rank killed by a fault script has the result None.

        Raises:
            RankFailed: a rank raised; the others were released; the error is the ``__cause__``.
            SimulatedDeadlock: no rank can go on; the message says what each waits for.
        """
        _profilers.install()
        scheduler = Scheduler(self.world_size)
        board = Board(scheduler, tuple(range(self.world_size)))
        boards: dict[tuple[tuple[int, ...], str], Board] = {}
        results: list[Any] = [None] * self.world_size

        def main(rank: int) -> None:
            _context.enter_rank(_SimulatedRank(rank, scheduler))
            error: BaseException | None = None
            try:
                scheduler.begin(rank)
                with _context.use_group(_make_group(board, rank, boards)):
                    results[rank] = function(_current(), *args, **kwargs)
            except BaseException as raised:
                error = raised
            scheduler.end(rank, error)

        threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        scheduler.start()
        stuck = ""
        try:
            if not scheduler.finished.wait(self.timeout):
                stuck = self._report_stuck(scheduler, threads)
        except BaseException:  # the caller is interrupted
            self._give_up(scheduler, threads)
            raise
        if stuck:
            raise SimulationError(f"{stuck}{self._give_up(scheduler, threads)}")
        for thread in threads:
            thread.join()
        self._raise_failure(scheduler)
        return results

    def _raise_failure(self, scheduler: Scheduler) -> None:
        failure = scheduler.failure
        if failure is None or isinstance(failure, Released):
            return
        if scheduler.failed_rank < 0:
            raise failure
        raise RankFailed(
            f"rank {scheduler.failed_rank} of {self.world_size} raised {type(failure).__name__}: {failure}",
            rank=scheduler.failed_rank,
        ) from failure

    def _give_up(self, scheduler: Scheduler, threads: list[threading.Thread]) -> str:
        """End the ranks; what there is to say of those that cannot be ended."""
        scheduler.give_up()
        deadline = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if not left:
            return ""
        return (
            f"the threads of ranks {left} have not ended, since one of them does not come to a collective: what it "
            f"does to random numbers and other state of this process disturbs whatever comes next in it"
        )

    def _report_stuck(self, scheduler: Scheduler, threads: list[threading.Thread]) -> str:
        frames = sys._current_frames()
        stacks = [
            f"--- rank {rank}\n{''.join(traceback.format_stack(frames[thread.ident])[-4:])}"
            for rank, thread in enumerate(threads)
            if scheduler.ranks[rank].status == "ready" and thread.ident in frames
        ]
        return (
            f"the simulation of {self.world_size} ranks did not end within {self.timeout:g} s:\n"
            f"{scheduler.describe()}\n{''.join(stacks)}"
        )


class _SimulatedRank:
    """Stands for one simulated rank; fault scripts stop it through this."""

    def __init__(self, rank: int, scheduler: Scheduler) -> None:
        self.rank = rank
        self._scheduler = scheduler

    def hang(self) -> None:
        self._scheduler.hang(self.rank)

    def die(self) -> None:
        raise SimulatedDeath(f"rank {self.rank} was killed by a fault script")


def simulate(world_size: int, *, timeout: float = 100.0) -> Simulation:
    """``world_size`` ranks in this process; ``run`` a function on them.

    >>> import torch
    >>> def main(group):
    ...     tensor = torch.ones(3) * group.rank
    ...     group.all_reduce(tensor)
    ...     return tensor.tolist()
    >>> simulate(3).run(main)
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    return Simulation(world_size, timeout=timeout)


def _current() -> Group:
    group = _context.registered_group()
    assert group is not None, "run() registers the group before it calls the function"
    return group


def _make_group(board: Board, rank: int, boards: dict[tuple[tuple[int, ...], str], Board]) -> Group:
    def make_subgroup(ranks: tuple[int, ...], key: str, backend: str = "", timeout: float = 0.0) -> ThreadTransport:
        sub = boards.setdefault((ranks, key), Board(board.scheduler, tuple(board.ranks[r] for r in ranks)))
        return ThreadTransport(sub, ranks.index(rank))

    return Group(ThreadTransport(board, rank), ranks=range(len(board.ranks)), make_subgroup=make_subgroup)
