"""Decides how many agents of a job to start on a cluster, and what the end of one means. Pure.

The cluster decides when an agent begins: one that it has no room for waits, and its scheduler (an autoscaler, where
there is one) sees the demand. So following the cluster up and down needs one rule only: as many agents are under way,
running or waiting for room, as the job may have nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.errors import PhalanxError


class JobFailed(PhalanxError):
    """The job ended without success; the message says what its agents said."""


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended. ``code``: of its process; None when it was lost together with its worker process or node."""

    code: int | None
    why: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether the job goes on without it: its machine or process is gone, or it was told to leave by a
        signal. An agent that ends by itself says how the whole job ended.

        >>> [AgentEnd(code).is_lost for code in (None, -9, 143, 1, 0)]
        [True, True, True, False, False]
        """
        return self.code is None or self.code < 0 or self.code > 128


@dataclass(frozen=True, kw_only=True)
class Agents:
    """The agents of one job, as far as its driver knows."""

    max_nodes: int
    max_losses: int
    num_under_way: int = 0
    """Running, or waiting for room."""
    num_lost: int = 0
    is_done: bool = False
    failure: str = ""

    @property
    def is_over(self) -> bool:
        return self.is_done or bool(self.failure)

    @property
    def num_to_start(self) -> int:
        """Return how many to ask the cluster for now.

        >>> Agents(max_nodes=4, max_losses=9, num_under_way=3).num_to_start
        1
        """
        return 0 if self.is_over else self.max_nodes - self.num_under_way

    def started(self, count: int) -> Agents:
        return replace(self, num_under_way=self.num_under_way + count)

    def after(self, end: AgentEnd) -> Agents:
        """Return them after the end of one.

        >>> three = Agents(max_nodes=3, max_losses=1, num_under_way=3)
        >>> three.after(AgentEnd(None, "its node died")).num_to_start
        1
        >>> three.after(AgentEnd(0)).is_done
        True
        """
        left = replace(self, num_under_way=self.num_under_way - 1)
        if self.is_over:
            return left
        if end.code == 0:
            return replace(left, is_done=True)
        if not end.is_lost:
            return replace(left, failure=f"an agent ended with exit code {end.code}{end.why and ': ' + end.why}")
        if self.num_lost == self.max_losses:
            return replace(left, failure=f"{self.num_lost + 1} agents were lost, the last one: {end.why or end.code}")
        return replace(left, num_lost=self.num_lost + 1)
