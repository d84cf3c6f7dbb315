"""Keeps what the loop of each worker does between the commit of one step and the next step, alike on all.

Owns the results of the evaluations of this boundary, and the way of a worker that took its last step over from another
(``Outcome.ADOPTED``). Its loop still has to run what follows the commit, which the other has run, wholly or up to the
evaluation that it is in. So: evaluations that are done are answered from the record, and the user's objects
(``Job(state=...)``), which the loop changes after commits, are left as they are until this worker has come to the place
where the other was; there they become the other's.
"""

from __future__ import annotations

from typing import Any

from phalanx.elastic.checkpoint._state import State


class Boundary:
    def __init__(self) -> None:
        self.results: list[dict[str, float]] = []
        """Of the evaluations since the last commit."""
        self.num_calls = 0
        """How many evaluations this worker's loop has asked for since then."""
        self.is_in_step = False
        """Whether a step of this worker is being given up: a state that comes now may be that after the step."""
        self._held: dict[str, Any] | None = None
        self._held_until: int | None = None
        """The evaluation that the other is in, counted from the commit; None: it is past this boundary."""

    def commit(self) -> None:
        """Begin a new boundary: a step was applied here."""
        self.results = []
        self.num_calls = 0

    # -- evaluations ------------------------------------------------------------------------------------------

    def recorded(self) -> dict[str, float] | None:
        """Return the result of the evaluation that is asked for now, if the others have it already."""
        return self.results[self.num_calls] if self.num_calls < len(self.results) else None

    @property
    def is_evaluating(self) -> bool:
        """Return whether this worker still has to come to an evaluation that the others are in."""
        return self._held_until is not None and self._held_until >= len(self.results)

    @property
    def is_past(self) -> bool:
        """Return whether the others have left the boundary that this worker's loop is still at."""
        return self._held is not None and self._held_until is None

    # -- the state --------------------------------------------------------------------------------------------

    def state_dict(self, is_evaluating: bool) -> State:
        return {"results": self.results, "evaluating": is_evaluating or self.is_evaluating}

    def load_state_dict(self, state: State) -> None:
        """Become a worker that is through with this boundary, as a newcomer is."""
        self.results = list(state["results"])
        self.num_calls = len(self.results)
        self._held = self._held_until = None

    def adopt(self, state: State, objects: dict[str, Any]) -> None:
        """Stand at the beginning of the boundary that another is in; ``objects`` are the user's, as they are there."""
        self.load_state_dict(state)
        self.num_calls = 0
        self._held = objects
        self._held_until = len(self.results) if state["evaluating"] else None

    @property
    def held(self) -> dict[str, Any]:
        """Return the objects' states that will count, of those that this worker has not taken over yet."""
        return self._held or {}

    def take_held(self, *, at_evaluation: bool) -> dict[str, Any]:
        """Return what to take over now, if this is the place where the other was."""
        if at_evaluation and (self._held_until is None or self.num_calls < self._held_until):
            return {}
        held, self._held, self._held_until = self._held or {}, None, None
        return held
