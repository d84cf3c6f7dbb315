"""Collects what a run has brought on this node, values and failures, and makes the result of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from phalanx.errors import StoreError
from phalanx.launch.agent._generation import Generation
from phalanx.launch.agent._observer import Observer
from phalanx.launch.config._worker_spec import RunResult, WorkerState
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.protocol import Setbacks, timeouts


class Results:
    """Collects values and failures by global rank."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.setbacks = Setbacks()
        """How often workers that were all new began with an earlier step."""
        self._failures: dict[str, ProcessFailure] = {}

    def add_failure(self, failure: ProcessFailure, generation: Generation) -> None:
        """Remember a failure and tell the other agents."""
        failure.generation = generation.number
        self._failures[failure.worker_id] = failure
        generation.channel.report(failure)

    def note_setbacks(self, setbacks: Setbacks, generation: int, observer: Observer) -> None:
        """Remember how often the job went back, and tell when that has changed."""
        before, self.setbacks = self.setbacks, setbacks
        if setbacks.count > before.count:
            observer.went_back(generation, before, setbacks)

    def count_setbacks(self, generation: Generation, observer: Observer) -> int:
        """Look for the last time how often the job went back; the number."""
        try:
            self.note_setbacks(generation.channel.setbacks(), generation.number, observer)
        except StoreError:
            pass  # it went with the node that served it: what was heard of before counts
        return self.setbacks.count

    def succeeded(self) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED, dict(self.values))

    def failed(self, generation: Generation, reason: str, unheard: Sequence[ProcessFailure] = ()) -> RunResult:
        """Return all failures of the generation, also those of other nodes; ``unheard`` ones of this node are new.

        Waits for the other nodes: the first to notice is seldom the one where it began.
        """
        found: dict[int, ProcessFailure] = {}
        try:
            for failure in unheard:
                self.add_failure(failure, generation)
            generation.channel.say_done(generation.number, generation.info.rank, "failed")
            generation.channel.wait_done(generation.number, generation.info.world_size, "failed", timeouts.OTHER_AGENTS)
        except StoreError:
            pass  # a node is gone, or the store: what is known will do
        try:
            found = generation.channel.failures(generation.number)
        except StoreError:
            pass
        mine = {f.rank: f for f in self._failures.values() if f.generation == generation.number}
        if not (found or mine):
            found = _unexplained(generation, reason)
        return RunResult(WorkerState.FAILED, failures={**found, **mine})

    def closed(self, generation: Generation, reason: str) -> RunResult:
        """Make the result when somebody closed the rendezvous while workers of this node ran."""
        message = (
            f"the rendezvous was closed while this node's workers ran, and the job has not finished: {reason}. See the "
            "other nodes' output, or who else can write to the job's store (a job secret keeps strangers out)"
        )
        return RunResult(WorkerState.FAILED, failures=_unexplained(generation, message))

    def node_is_empty(self) -> RunResult:
        """Make the result when no worker is left on this node, while the job may go on elsewhere."""
        if self._failures:
            return RunResult(WorkerState.FAILED, failures={f.rank: f for f in self._failures.values()})
        return self.succeeded()


def _unexplained(generation: Generation, reason: str) -> dict[int, ProcessFailure]:
    """Return a failure of no worker in particular, in the place of this node's first."""
    failure = ProcessFailure(local_rank=-1, pid=0, exitcode=1, message=reason, timestamp=time.time())
    return {generation.info.node.base_rank: failure}
