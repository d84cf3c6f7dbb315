"""Lets simulated ranks take turns: threads of which exactly one runs at any time.

Owns the order in which ranks run, which makes a simulation deterministic: a rank runs until it waits for another,
then the next one (cyclically) that can go on does. Owns also the end of a simulation: the first error releases all
others, and when nobody can go on the deadlock is reported with what each rank waits for. A simulation that is given up
ends its ranks in the same way, each at its next turn or its next collective.

Guarantees: same program, same interleaving. Random numbers of torch's default CPU generator belong to a rank: its
state is kept across turns.
Assumptions: ranks wait for one another only through this scheduler (collectives); a rank that blocks on a lock held
by another rank's thread stops the simulation, and ``run`` reports it after its timeout.
Rejected: free-running threads (no determinism, deadlocks found by timeout only).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from phalanx.errors import PeerTimeout, SimulatedDeadlock


class Released(BaseException):
    """Unwinds a rank after another one failed; never seen by users."""


class SimulatedDeath(BaseException):
    """Unwinds a rank that a fault script killed."""


@dataclass
class RankState:
    """One simulated rank, as the scheduler sees it."""

    rank: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: str = ""
    can_go_on: Callable[[], bool] | None = None
    status: str = "ready"
    """ready (includes running), waiting, hung, dead, done"""
    rng: torch.Tensor | None = None


class Scheduler:
    """The turns of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.ranks = [RankState(rank) for rank in range(size)]
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self.all_well = True
        """Whether no rank has died or hangs."""
        self.is_given_up = False
        self.finished = threading.Event()
        self._initial_rng = torch.get_rng_state()

    def start(self) -> None:
        self.ranks[0].turn.release()

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        self._take_turn(self.ranks[rank])
        torch.set_rng_state(self._initial_rng)

    def wait(self, rank: int, can_go_on: Callable[[], bool], waits_for: str) -> None:
        """Let others run until ``can_go_on()``; ``waits_for`` is what a deadlock report says."""
        self.check()
        if can_go_on():
            return
        state = self.ranks[rank]
        state.status, state.can_go_on, state.waits_for = "waiting", can_go_on, waits_for
        state.rng = torch.get_rng_state()
        self._pass_turn(rank)
        self._take_turn(state)
        torch.set_rng_state(state.rng)
        state.status, state.can_go_on, state.waits_for = "ready", None, ""

    def check(self) -> None:
        """Unwind the rank that calls if the simulation was given up."""
        if self.is_given_up:
            raise Released

    def give_up(self) -> None:
        """End all ranks, from outside: whoever has the turn at its next collective, the others as it is passed on."""
        self.is_given_up = True
        self.failure = self.failure or Released()

    def hang(self, rank: int) -> None:
        """Stop this rank for good, as SIGSTOP would; unwinds when the others are done."""
        state = self.ranks[rank]
        state.status, self.all_well = "hung", False
        self._pass_turn(rank)
        self._take_turn(state)
        raise Released

    def end(self, rank: int, error: BaseException | None) -> None:
        """Take note that this rank's function returned (None), died, was released, or failed with ``error``."""
        state = self.ranks[rank]
        state.status = "dead" if isinstance(error, SimulatedDeath) else "done"
        self.all_well = self.all_well and state.status == "done"
        if error is not None and not isinstance(error, Released | SimulatedDeath) and self.failure is None:
            self.failure, self.failed_rank = error, rank
        self._pass_turn(rank)

    def is_dead(self, rank: int) -> bool:
        return self.ranks[rank].status == "dead"

    def is_hung(self, rank: int) -> bool:
        return self.ranks[rank].status == "hung"

    def describe(self) -> str:
        lines = []
        for state in self.ranks:
            doing = f"waits for {state.waits_for}" if state.status == "waiting" else state.status
            lines.append(f"  rank {state.rank}: {doing}")
        return "\n".join(lines)

    def _take_turn(self, state: RankState) -> None:
        state.turn.acquire()
        if self.failure is not None:
            raise Released

    def _pass_turn(self, rank: int) -> None:
        following = self._next(rank)
        if following is not None:
            following.turn.release()
            return
        left = [state for state in self.ranks if state.status in ("waiting", "hung")]
        if not left:
            self.finished.set()
            return
        if self.failure is None and any(state.status == "waiting" for state in left):
            self.failure, self.failed_rank = self._stuck(), -1
        elif self.failure is None:
            self.failure = Released()  # only hung ranks are left: unwind them
        left[0].turn.release()

    def _next(self, rank: int) -> RankState | None:
        size = len(self.ranks)
        for offset in range(1, size + 1):
            state = self.ranks[(rank + offset) % size]
            if self.failure is not None:
                if state.status not in ("done", "dead"):
                    return state
            elif state.status == "ready" or (
                state.status == "waiting" and state.can_go_on is not None and state.can_go_on()
            ):
                return state
        return None

    def _stuck(self) -> BaseException:
        if any(state.status == "hung" for state in self.ranks):
            return PeerTimeout(f"a simulated rank hangs and the others wait:\n{self.describe()}")
        return SimulatedDeadlock(
            f"every simulated rank waits for another one:\n{self.describe()}\n"
            f"All ranks of a group must call the same collectives in the same order"
        )
