"""The state of a job: telling it, becoming it, saving it.

Owns ``JobState``, the half of a job that deals with what it is rather than with what it does next; ``_job`` has the
other. What the parts of a state are is ``checkpoint``'s business.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from phalanx.elastic._boundary import Boundary
from phalanx.elastic._fingerprint import Fingerprint, take_fingerprint
from phalanx.elastic._guard_record import GuardRecord
from phalanx.elastic._guarding import Guarding
from phalanx.elastic._loading import Schedule
from phalanx.elastic.checkpoint._saving import Saving, no_readable_save
from phalanx.elastic.checkpoint._state import State, Stateful, StatefulObjects, digest
from phalanx.elastic.checkpoint._state_codec import copy_encoded
from phalanx.elastic.membership._coordinator import EvaluationKnown, ResultLost
from phalanx.elastic.membership._final_state import Encoded
from phalanx.elastic.membership._lost import LOST
from phalanx.elastic.membership._regroup import Regrouping
from phalanx.elastic.membership._sync import BitsWarning, differences, fingerprint
from phalanx.elastic.reduce._partials import Pool
from phalanx.elastic.tools._audit_log import Audit
from phalanx.events._event_types import Resumed, WeightsCompared
from phalanx.events._writer import EventLog

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding

T = TypeVar("T")


class JobState:
    """What a job is; ``Job`` makes its parts."""

    model: nn.Module
    seed: int
    sharding: JobSharding | None
    schedule: Schedule
    boundary: Boundary
    regrouping: Regrouping
    guarding: Guarding
    saving: Saving
    audit: Audit
    events: EventLog
    pool: Pool
    is_fresh: bool
    attempt: int
    loss: float | None
    grad_norm: float | None
    logs: dict[str, float]
    is_finishing: bool
    loop_state: Mapping[str, Stateful]
    num_evaluations: int
    last_evaluation: dict[str, float]
    final_digest: str | None
    """Of a sharded job after its last step."""
    _parts: StatefulObjects
    _objects: frozenset[str]
    _resumes: int

    @property
    def step(self) -> int:
        """Return the number of committed steps."""
        return self.schedule.step

    @property
    def worker_id(self) -> str:
        return self.regrouping.coordinator.worker_id

    def digest(self) -> str:
        """sha256 over weights, optimizer state, the other objects' state and the data position.

        It is the same for the sharded and the unsharded job. Inside the loop all workers of a sharded job call it
        together; after the loop it is that of the last step.
        """
        if self.sharding is not None:
            return self.final_digest or self.sharding.digest()
        return digest({"parts": self._capture(), "sampler": self.schedule.state_dict()})

    def fingerprint(self) -> Fingerprint | None:
        """Compare the weights of all workers, without gathering them; the digests that all of them have.

        All workers call it, in the loop after a commit. None if a worker was lost meanwhile: the next step finds out,
        so ask again later. It is the same for any number of workers, sharded or not, and so tells runs apart too.

        Raises:
            WorkersDiffer: some have other bits; the message names workers and parameters.

        >>> if step.commit() and step.number % 1000 == 999:     # doctest: +SKIP
        ...     print(job.fingerprint())
        """
        membership, coordinator = self.regrouping.membership, self.regrouping.coordinator
        coordinator.waiting(True)
        try:
            self.regrouping.check()
            found = take_fingerprint(self, membership.group, membership.workers)
        except LOST as error:
            if self.sharding is not None:
                self.sharding.note_loss(error)
            else:
                self.regrouping.note_loss(error)
            return None
        finally:
            coordinator.waiting(False)
        if membership.rank == 0:
            self.events.write(WeightsCompared(step=found.step, digest=found.digest, workers=found.num_workers))
        return found

    def state_dict(self) -> State:
        """Return everything that decides what the next step computes; its tensors are the live ones."""
        return {
            "parts": self._capture(),
            "sampler": self.schedule.state_dict(),
            "resumes": self._resumes,
            "attempt": self.attempt,
            "evaluations": [self.num_evaluations, self.last_evaluation],
            "boundary": self.boundary.state_dict(self.regrouping.is_evaluating),
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "logs": self.logs,
            "finishing": self.is_finishing,
            "writer": self.regrouping.writer,
            "guard": self.guarding.record.to_state(),
            "seed": self.seed,
            "machine": fingerprint(self.model),
            **({} if self.final_digest is None else {"digest": self.final_digest}),
        }

    def state_for_newcomers(self) -> State:
        """Return the state with that of the loop, which only a worker without a state of its own takes."""
        loop = {name: part.state_dict() for name, part in self.loop_state.items()}
        return {**self.state_dict(), **({"loop": loop} if loop else {})}

    def full_state_dict(self, *, everywhere: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the whole model, under its own names, also of a sharded one.

        Of a sharded job all workers call it together; with ``everywhere=False`` only the first gets it, the others an
        empty dict.
        """
        if self.sharding is None:
            return dict(self.model.state_dict())
        sharding = self.sharding
        if not self.regrouping.is_over:
            return sharding.full_state_dict(everywhere=everywhere)
        return self._after_losses(lambda: sharding.full_state_dict(everywhere=everywhere))

    def _after_losses(self, collect: Callable[[], T]) -> T:
        """Run, after the last step, what needs the cells of all workers; if some are lost, with those that are left.

        For those who regroup it counts as an evaluation, so that nobody is waited for who is through with it.
        """
        self.regrouping.is_evaluating = True
        try:
            while True:
                try:
                    self.regrouping.check()
                    found = collect()
                    break
                except LOST as error:
                    self.regrouping.recover(error)
        except EvaluationKnown:
            raise ResultLost(
                f"worker {self.worker_id} asks for the model after step {self.step}, and the others, who hold its "
                "cells, have had it and gone on: what is collected after the loop is there once. Write it to a file on "
                "the worker that has it, or read the last save (Saves)"
            ) from None
        finally:
            self.regrouping.is_evaluating = False
        self.regrouping.coordinator.publish_evaluation(self.num_evaluations, {})
        self.num_evaluations += 1
        return found

    def copy_state(self) -> Encoded:
        """Return a copy of the state in main memory, taken after the last step: the gradients' memory is given up for
        it."""
        self.pool.free.clear()
        return copy_encoded(self.state_for_newcomers())

    def load_state_dict(self, state: State) -> None:
        """Become ``state``. The tensors in it may be taken over; do not use them afterwards."""
        self.take_state(state)
        self.begin_attempt(parent=self.attempt)

    def take_state(self, state: State) -> None:
        """As ``load_state_dict``, for the state of another worker of the same attempt."""
        self._load(state, but=())
        self.boundary.load_state_dict(state.get("boundary", {"results": []}))
        for name, value in state.get("loop", {}).items():
            self.loop_state[name].load_state_dict(value)

    def take_over(self, state: State) -> None:
        """Become what another worker is; in mid-step, only what a commit changes. For ``bring_level`` only."""
        if self.boundary.is_in_step and not self.is_fresh:
            self._load(state, but=self._objects, keep_options=bool(self.loop_state))
            self.hold_objects(state)
        else:
            self.take_state(state)

    def take_parts(self, parts: State) -> None:
        """Take model, optimizer and objects of a save, and leave the data position as it is. For ``_rollback`` only."""
        self._parts.apply(parts, but=())

    def hold_objects(self, state: State) -> None:
        """Keep the user's objects of a worker that is ahead until this one's loop has come to the same place."""
        objects = {name: value for name, value in state["parts"]["others"].items() if name in self._objects}
        self.boundary.adopt(state["boundary"], objects)

    def take_held_objects(self, *, at_evaluation: bool = False) -> None:
        """Bring the user's objects level with the worker that the last step was taken over from, if it is time."""
        self._parts.apply_objects(self.boundary.take_held(at_evaluation=at_evaluation))

    def count_evaluation(self, result: dict[str, float]) -> None:
        """Count an evaluation that is complete."""
        self.num_evaluations += 1
        self.last_evaluation = result
        self.boundary.results.append(result)

    def _capture(self) -> State:
        parts = self._parts.capture()
        parts["others"].update(self.boundary.held)
        return parts

    def _load(self, state: State, but: frozenset[str] | tuple[()], *, keep_options: bool = False) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a job with seed {state['seed']}, this one has {self.seed}")
        self._parts.apply(state["parts"], but=but, keep_options=keep_options)
        self.schedule.load_state_dict(state["sampler"])
        self._resumes = state["resumes"]
        self.attempt = state.get("attempt", self._resumes)
        self.num_evaluations, self.last_evaluation = state["evaluations"]
        self.loss, self.grad_norm = state["loss"], state.get("grad_norm")
        self.logs = state.get("logs", {})
        self.is_finishing = state.get("finishing", False)
        self.guarding.record = GuardRecord.from_state(state.get("guard"))
        self.final_digest = state.get("digest")
        self.is_fresh = False

    def save(self, *, wait: bool = True) -> None:
        """Write the state to the saves' directory; without ``wait`` in the background.

        Raises:
            NonFinite: the state is not finite (see ``Guard``); it is not saved.
            OSError: with ``wait``, the disk does not take it. Else it is tried again, and training goes on.
        """
        self.guarding.check_state()
        self.submit_save()
        if wait:
            if self.sharding is not None:
                self.sharding.wait_for_submits()
            self.saving.wait_idle()

    def submit_save(self) -> None:
        """Have the state written in the background; of a sharded job by all workers, each its part."""
        if self.sharding is None:
            self.saving.submit(self.step, self.state_for_newcomers(), self.guarding.clean_since)
        else:
            place = self.regrouping.membership
            key = f"{self.attempt}.{place.generation}.{place.round}"
            self.sharding.submit_save(key, self.guarding.clean_since)

    def load_save(self) -> bool:
        """Take the newest readable save; False if there is none. The workers' first place does it by itself.

        Raises:
            NoReadableSave: there are saves, but none can be read.
        """
        problems = self.saving.problems()
        state = self.saving.load()
        if problems:
            raise no_readable_save(self.saving.options, {self.worker_id: problems})
        if state is None:
            return False
        self.resume(state, is_first=True)
        return True

    def resume(self, state: State, *, is_first: bool) -> None:
        """Become what was saved; the first worker to do so begins a new attempt. For ``checkpoint``'s readers only."""
        if listed := differences(state["machine"], fingerprint(self.model)):
            warnings.warn(
                f"the save and this worker differ in {listed}: what follows is computed otherwise than what was "
                "saved. For equal bits resume alike (RunOptions(threads=1) sets the threads)",
                BitsWarning,
                stacklevel=2,
            )
        resumed = {**state, "resumes": state["resumes"] + 1}
        if is_first:
            self.load_state_dict(resumed)
        else:
            self.take_state(resumed)
        self.events.write(Resumed(step=self.step))

    def begin_attempt(self, parent: int | None = None) -> None:
        """Nobody has a state in memory: a new attempt begins, with the state that ``parent`` saved or from nothing.

        Its number is the time, so that it is larger than that of any attempt before, also of one that was begun from
        another save or whose save is gone.
        """
        self.attempt = max((parent or 0) + 1, time.time_ns() // 1_000_000)
        self.audit.attempt(self.attempt, self.step, parent)
