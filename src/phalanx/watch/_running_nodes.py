"""Tells from the events of agents whether a job is over: a node that ends early does not end the others. Pure.

A node counts from the moment that its agent tells of a generation. Of agents that nobody hears (their events lie on
another machine) nothing is known, and nobody waits for them.
"""

from __future__ import annotations

from phalanx.events._agent_events import GenerationFormed, ShutDown
from phalanx.events._event_types import AnyEvent


class RunningNodes:
    """The nodes of the newest generation that have not ended.

    >>> nodes = RunningNodes()
    >>> nodes.ends(ShutDown(job="demo", reason="done", succeeded=True))
    True
    """

    def __init__(self) -> None:
        self._generation = -1
        self._running: set[int] = set()
        """By their ranks in that generation."""
        self.is_over = False
        self.has_lost = False
        """Whether a node of that generation has ended."""

    def ends(self, event: AnyEvent) -> bool:
        """Take an event; whether it is the end of the job."""
        if isinstance(event, GenerationFormed):
            self._take_generation(event)
        elif isinstance(event, ShutDown):
            is_of_newest = event.generation in (-1, self._generation)  # -1: told before events had it
            if is_of_newest:
                self._running.discard(event.node_rank)
                self.has_lost = True
            self.is_over = not self._running
            return self.is_over
        return False

    def _take_generation(self, event: GenerationFormed) -> None:
        if event.generation > self._generation or self.is_over:  # over: the next run, into the same directory
            self._generation, self._running = event.generation, set()
            self.is_over = self.has_lost = False
        if event.generation == self._generation:
            self._running.add(event.node_rank)
