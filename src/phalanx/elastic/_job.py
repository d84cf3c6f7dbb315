"""Trains a model while workers die, leave or join, with the bits of an undisturbed run.

Owns the loop and the parts of the job. Who the other workers are, and how that changes, is ``membership``'s business,
what a step computes ``_step``'s, what a state is ``checkpoint``'s.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from phalanx.data import ElasticBatchSampler
from phalanx.elastic._boundary import Boundary
from phalanx.elastic._dealing import Dealing
from phalanx.elastic._evaluate import evaluate
from phalanx.elastic._guard import Guard
from phalanx.elastic._job_checks import check_loop_state, check_next, check_optimizer
from phalanx.elastic._job_state import JobState
from phalanx.elastic._loading import Fetcher, Loading, Schedule
from phalanx.elastic._options import Callbacks, DataOptions, RunOptions, Saves
from phalanx.elastic._sharded import make_guarding, make_sharding, make_step, make_verifying, objects_of
from phalanx.elastic._step import Outcome, Step
from phalanx.elastic._telling import Telling
from phalanx.elastic._tracking import Tracker, Tracking
from phalanx.elastic._verify_slots import VerifySlots
from phalanx.elastic._warm_up import warm_up
from phalanx.elastic.checkpoint._owner import DirectoryOwner, identity_of_job
from phalanx.elastic.checkpoint._saving import Saving
from phalanx.elastic.checkpoint._state import Stateful, digest
from phalanx.elastic.membership._coordinator import Coordinator
from phalanx.elastic.membership._leave import fail_at_exit, has_ended_well
from phalanx.elastic.membership._make_coordinator import make_coordinator
from phalanx.elastic.membership._regroup import Regrouping
from phalanx.elastic.membership._rounds import Membership
from phalanx.elastic.membership._sync import bring_level, describe_model, warn_not_deterministic
from phalanx.elastic.reduce._buffers import Buffers
from phalanx.elastic.reduce._early_send import EarlySend
from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._partials import Pool
from phalanx.elastic.reduce._reduction import Reduction
from phalanx.elastic.tools._audit_log import Audit
from phalanx.elastic.tools._events_file import events_path
from phalanx.elastic.tools._position_file import PositionFile
from phalanx.elastic.tools._status_line import StatusLine
from phalanx.elastic.tools._step_clock import StepClock
from phalanx.errors import CommError
from phalanx.events._event_types import TrainingFinished, TrainingStarted
from phalanx.events._troubles import Troubles
from phalanx.events._writer import EventLog
from phalanx.protocol import ENV_JOB, ENV_LIVE_LINE, ENV_POSITION_FILE

WORKERS_FORESEEN = 1024
"""For how many workers gradients are laid out from the beginning; for more of them, when they come."""


class Job(JobState):
    """An elastic training job; the loop stays a plain loop.

    >>> job = Job(model, optimizer, dataset, num_slots=8, slot_batch_size=16, seed=0)     # doctest: +SKIP
    >>> for step in job.steps(epochs=3):                                                  # doctest: +SKIP
    ...     for micro in step:
    ...         micro.backward(loss_fn(model(micro.inputs), micro.targets))
    ...     step.commit()

    ``num_slots`` is the number of logical workers: the result depends on it, never on the number of processes.
    ``scheduler`` steps once per committed step; ``scaler`` is a ``torch.amp.GradScaler``; ``state`` names further
    objects with ``state_dict`` and ``load_state_dict`` that belong to the job; ``loop_state`` those that belong to the
    loop, which changes them alike on all workers: only a newcomer takes them over (see ``docs/elastic-trainers.md``).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        num_slots: int,
        slot_batch_size: int,
        seed: int = 0,
        scheduler: Stateful | None = None,
        scaler: Any = None,
        state: Mapping[str, Stateful] | None = None,
        loop_state: Mapping[str, Stateful] | None = None,
        data: DataOptions = DataOptions(),  # noqa: B008  # a frozen value
        saves: Saves | None = None,
        run: RunOptions = RunOptions(),  # noqa: B008  # a frozen value
        callbacks: Callbacks = Callbacks(),  # noqa: B008  # a frozen value
        guard: Guard = Guard(),  # noqa: B008  # a frozen value
        verify_slots: VerifySlots | None = None,
        trackers: Sequence[Tracker] = (),
        copies: int | Literal["all"] | None = None,
        spread: Literal["node", "worker"] = "node",
    ) -> None:
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.num_slots = num_slots
        self.slot_batch_size = slot_batch_size
        self.seed = seed
        self.callbacks = callbacks
        self.run = run
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.param_names, self.params = list(named), list(named.values())
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        check_optimizer(optimizer, model)
        warn_not_deterministic(model)
        given = {"scheduler": scheduler, "scaler": scaler}
        others = {**{k: v for k, v in given.items() if v is not None}, **(state or {})}
        self.sharding = make_sharding(self, copies, spread, others)
        self._parts = objects_of(self.sharding, model, optimizer, others)
        self._objects = frozenset(state or {})
        self.loop_state = check_loop_state(loop_state, is_sharded=self.sharding is not None)
        self.buffers = Buffers(model)
        if self.sharding is not None:
            self.params = []  # they would keep the whole model in memory
        self.pool = Pool(FlatLayout.of(self.params, self.buffers.live(), num_slots), WORKERS_FORESEEN)
        overlaps = run.overlap and self.sharding is None
        self.early = EarlySend(self.params, self.param_names, self.pool.layout) if overlaps else None
        self.dealing = Dealing(self, is_on=run.balance)
        self.verifying = make_verifying(self, verify_slots)
        self.guarding = make_guarding(self, guard, has_saves=saves is not None)
        sampler = ElasticBatchSampler(
            dataset,
            num_slots,
            slot_batch_size,
            slots=(),
            shuffle=data.shuffle,
            seed=seed,
            tail=data.tail,
            order=data.order,
            block_size=data.block_size,
        )
        self.schedule = Schedule(sampler, data.parts)
        self.loading = Loading(Fetcher(dataset, data.collate_fn, seed), data.num_workers)
        coordinator = make_coordinator(run.group, comm_timeout=run.timeout)
        logs = None if run.log_dir is None else Path(run.log_dir)
        name = coordinator.worker_id.replace("/", "_")
        self.troubles = Troubles()
        self.audit = Audit(logs and logs / f"audit-{name}.jsonl", troubles=self.troubles)
        path = events_path(logs, name, os.environ)
        self.events = EventLog(path, worker=coordinator.worker_id, troubles=self.troubles)
        self.clock = StepClock(self.events)
        self.progress = StatusLine(run.progress and ENV_LIVE_LINE not in os.environ)
        self.position = PositionFile(os.environ.get(ENV_POSITION_FILE, ""))
        identity = identity_of_job(os.environ, has_group=run.group is not None)
        self.log_owner = None if logs is None else DirectoryOwner(logs, identity)
        self.saving = Saving(saves, self.events, self.troubles, identity=identity)
        self.regrouping: Regrouping = Regrouping(self, coordinator)
        self.is_fresh = True
        """Whether this worker has no state yet that counts; another's or a save's may replace its own."""
        self.loss: float | None = None
        """Loss of the last committed step."""
        self.grad_norm: float | None = None
        """Its gradient's norm before clipping, if it was clipped."""
        self.logs: dict[str, float] = {}
        """What its micro-batches logged."""
        self.is_finishing = False
        """Whether the loop has said that the last committed step was the last of all."""
        self._current: Step | None = None
        self.boundary = Boundary()
        self.telling = Telling(self)
        self.tracking = Tracking(trackers, os.environ.get(ENV_JOB) or "phalanx")
        self.num_evaluations = 0
        self.last_evaluation: dict[str, float] = {}
        self._has_looped = False
        self.final_digest: str | None = None
        self._resumes = 0
        self.attempt = 0
        """The number of this run of the job from its beginning or from a save; see ``Audit``."""
        self._read_ahead: tuple[int, int, int, range] | None = None

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.schedule.epoch

    @property
    def generation(self) -> int:
        return self.regrouping.membership.generation

    @property
    def rank(self) -> int:
        """This worker's, from 0. Changes at regroups; after the last step it stays, and passes to a replacement."""
        return self.regrouping.rank

    @property
    def world_size(self) -> int:
        return self.regrouping.world_size

    @property
    def is_writer(self) -> bool:
        """Return whether files, logs and checkpoints are this worker's business: it is there for the longest.

        Unlike rank 0, which a replacement may get, the writer stays the same as long as it lives
        (``Callbacks.on_writer``).
        """
        return self.regrouping.writer == self.worker_id

    @property
    def lineage(self) -> list[int]:
        """Return what tells this attempt at a step from earlier ones; later is larger."""
        membership = self.regrouping.membership
        again = len(self.guarding.attempt) + self.verifying.attempt
        return [self.attempt, membership.generation, membership.round, *([again] if again else [])]

    @property
    def is_sharded(self) -> bool:
        return self.sharding is not None

    @property
    def is_before_evaluation(self) -> bool:
        """Return whether this worker still has to come to an evaluation that the others are in."""
        return self.boundary.is_evaluating

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all workers; ``model`` stands for all of its parameters and buffers."""
        sampler = self.schedule.sampler
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        if self.sharding is not None:
            groups = self.sharding.pieces.group_sizes
        return {
            **({} if self.sharding is None else self.sharding.identity()),
            "num_slots": self.num_slots,
            "slot_batch_size": self.slot_batch_size,
            "seed": self.seed,
            "steps_per_epoch": sampler.steps_per_epoch,
            "order": sampler.order.name,
            "tail": sampler.tail,
            "parts": self.schedule.num_parts,
            "guard": str(self.guarding.guard),
            "balance": self.run.balance,
            "verify_slots": str(self.verifying.options),
            "model": digest(list(describe_model(self.model).items())),
            "optimizer": f"{type(self.optimizer).__name__} of {'+'.join(map(str, groups))} parameters",
        }

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(
        self, epochs: int | None = None, *, max_steps: int | None = None, until_finish: bool = False
    ) -> Iterator[Step]:
        """Return the steps that are not committed yet, up to a number of epochs or of steps, whichever comes first, or
        until ``finish`` is called.

        A step that could not be committed because a worker was lost comes again, or was taken over from a worker that
        had committed it: ``step.commit()`` says which (``Outcome``).
        """
        if epochs is None and max_steps is None and not until_finish:
            raise ValueError("steps() needs epochs or max_steps, or until_finish=True for a loop that calls finish()")
        if self._has_looped and self.regrouping.coordinator.can_change:
            raise RuntimeError(
                "steps() was called again after its end; a worker that joins could not tell which loop it is in. "
                "Use one loop, and job.evaluate() inside it (step.is_last_of_epoch) or after it"
            )
        with self.regrouping.leave.listen(), self.clock.counting():
            try:
                self.final_digest = None
                self.begin(None if epochs is max_steps is None else self.schedule.last_step(epochs, max_steps))
                while not self._is_over(epochs, max_steps):
                    self._check_frozen()
                    self._follow_data()
                    self.buffers.begin_step()
                    self.guarding.begin_step()
                    self.verifying.begin_step()
                    step = self._current = make_step(self)
                    yield step
                    self.take_held_objects()
                    if step.committed:
                        self.telling.tell(step)
                        self.clock.commit(step.number)
                        self.regrouping.cross_boundary(wish=step.wish, num_leaving=step.num_leaving)
                        self.dealing.cross_boundary()
                    elif step.dropped:
                        self._read_ahead = None  # it is read once more
                        self.telling.tell_again()
                    else:
                        raise RuntimeError(f"step {step.number} was not committed; call step.commit() in the loop")
                if self.sharding is None:  # else in finish_together: workers may come between this and the barrier
                    self.guarding.check_state()
                self.regrouping.part()
                self._has_looped = True
                self.telling.tell_again()
                self.clock.flush()
                self.events.write(TrainingFinished(step=self.step))
                self.audit.ended(self.lineage, self.step)
                self.loading.close()
                self.saving.settle()
                self.progress.close()
                atexit.register(self._at_exit)  # not now: an evaluation may follow
            except BaseException:
                self.close()
                raise

    def finish(self) -> None:
        """Say that the last committed step is the last of all: the loop gets no further one.

        Call it after the commit, under the same condition on every worker. A worker that comes later gets no step
        either: it takes the final state and runs what follows the loop, or is not needed.

        >>> for step in job.steps(until_finish=True):     # doctest: +SKIP
        ...     ...
        ...     if step.commit() and step.loss < 0.1:
        ...         job.finish()
        """
        if self._current is not None and not self._current.committed:
            raise RuntimeError(
                f"finish() in step {self._current.number}, which is not committed; call it after step.commit(), if "
                "that is true"
            )
        self.is_finishing = True

    def continue_at(self, step: int) -> None:
        """Begin at a later step: the loop has taken weights and optimizer of a checkpoint of its own. Before the first.

        Where other workers are further already, their state counts.
        """
        if self.regrouping.has_begun:
            raise RuntimeError(f"continue_at({step}) after the job has begun; call it before the first step")
        self.schedule.sampler.continue_at(step)

    def warm_up(self, loss_of: Callable[[Any], torch.Tensor]) -> None:
        """Compute one batch and forget it, before the loop: what torch.compile makes at the first call is made then.

        ``loss_of(batch)`` returns the loss of a batch as the loop computes it. A worker that comes while others train
        takes its seat when its loop begins: they go on until then. Weights, buffers, gradients and random numbers are
        as before. ``RuntimeError`` after the job has begun, ``ValueError`` for a sharded model.

        >>> job.warm_up(lambda batch: loss_fn(model(batch[0]), batch[1]))     # doctest: +SKIP
        """
        warm_up(self, loss_of)

    def begin(self, total_steps: int | None = None) -> None:
        """Join the other workers and take their state; ``steps`` does it."""
        if self.regrouping.has_begun:
            return
        self.audit.begin(
            {
                "num_slots": self.num_slots,
                "steps_per_epoch": self.schedule.sampler.steps_per_epoch,
                "num_samples_per_epoch": self.schedule.num_samples_per_epoch,
                "may_repeat": self.schedule.sampler.order.may_repeat,
            }
        )
        self.events.write(TrainingStarted(pid=os.getpid(), total_steps=total_steps, num_slots=self.num_slots))
        if self.log_owner is not None:
            self.log_owner.tell("logs", "the audit of two jobs would be one", self.events)
        self.regrouping.begin()

    def close(self) -> None:
        """End threads, files and the group; the state stays in memory and can be looked at and saved.

        The end of the process does it. Done earlier, a worker that dies later cannot take the state from this one.
        """
        atexit.unregister(self._at_exit)
        self.loading.close()
        self.saving.settle()
        self.saving.release()
        if self.log_owner is not None:
            self.log_owner.release()
        self.progress.close()
        self.tracking.close()
        self.regrouping.close()
        self.audit.close()
        self.events.close()
        self.position.close()
        self.troubles.say_last_words()

    def _at_exit(self) -> None:
        """The process ends: after the scripts of all workers, if this one's has ended well."""
        try:
            if has_ended_well():
                self.regrouping.stay(self.run.hold)
        except BaseException as error:  # what leaves an exit function is printed and forgotten
            fail_at_exit(error)
        finally:
            self.close()

    def _is_over(self, epochs: int | None, max_steps: int | None) -> bool:
        return (
            (self.regrouping.is_over and self.regrouping.coordinator.can_change)  # it came after the last step
            or self.is_finishing
            or (epochs is not None and self.epoch >= epochs)
            or (max_steps is not None and self.step >= max_steps)
        )

    def _check_frozen(self) -> None:
        for name, param in self.model.named_parameters() if self._frozen else ():
            if name in self._frozen and param.requires_grad:
                raise RuntimeError(
                    f"{name} did not require a gradient when the job was made and does now; make the job after "
                    "unfreezing, or set requires_grad before and leave the parameter out of the optimizer"
                )

    def _follow_data(self) -> None:
        """Have the loader read along our slots, anew after a regroup and at the beginning of an epoch."""
        slots = self.regrouping.reduction.slots
        now = (self.generation, self.regrouping.membership.round, self.epoch, slots)
        if now != self._read_ahead:
            self.loading.follow(self.schedule, slots)
            self._read_ahead = now

    def advance(self, step: Step) -> None:
        """Move everything else along: the optimizer has stepped. For ``Step`` only."""
        self.move_on(step)
        self.audit.committed(self.lineage, step.epoch, step.number)
        self.regrouping.coordinator.report(self.step, self.clock.pace(len(self.regrouping.reduction.slots)))
        self.regrouping.coordinator.note_commit(self.regrouping.membership, self.step)

    def move_on(self, step: Step) -> None:
        """Be behind a step: scheduler, position and what is told of it."""
        self.schedule.sampler.commit(step.number)
        if self.scheduler is not None:
            self.scheduler.step()  # type: ignore[attr-defined]  # every scheduler has it; Stateful asks for less
        self.loss, self.grad_norm, self.logs = step.loss, step.grad_norm, step.logs
        self.boundary.commit()

    def recover_from(self, step: Step, cause: CommError) -> Outcome:
        """Return the group was lost during a step: form it anew, and say what has become of the step. For ``Step``
        only."""
        self.boundary.is_in_step = True
        try:
            self.regrouping.recover(cause)
        finally:
            self.boundary.is_in_step = False
        if self.step <= step.number:  # less: cells were lost, and the job has gone back to a save
            return Outcome.DROPPED
        check_next(self, step.number)
        step.adopt()
        return Outcome.ADOPTED

    def form(self, membership: Membership) -> Reduction:
        """Take a place in a round. For ``Regrouping`` only."""
        if self.sharding is not None:
            return self.sharding.form(membership)  # type: ignore[return-value]  # its step does not ask for sums
        return Reduction(membership.group, self.num_slots, self.pool)

    def bring_level(self, coordinator: Coordinator, membership: Membership) -> None:
        """Become what the round's most advanced worker is. For ``Regrouping`` only."""
        if self.sharding is not None:
            self.sharding.bring_level(coordinator, membership)
        else:
            bring_level(self, coordinator, membership)
        self.dealing.begin_round(membership)

    def finish_together(self) -> None:
        """After the last step workers of a sharded job may go one by one: its digest is kept. For ``Regrouping``."""
        if self.sharding is not None:
            self.guarding.check_state()
            self.final_digest = self.sharding.finish()

    def hand_over(self) -> bool:
        """Before some workers leave; every worker of an unsharded job has everything. For ``Regrouping`` only."""
        return self.sharding is None or self.sharding.hand_over()

    # -- evaluation -------------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        function: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Means over a dataset, each sample exactly once, shared out among the workers; the same on all of them.

        ``function(batch)`` returns means over the batch by name. It runs without gradients on the model in
        evaluation mode. Call it on every worker, inside the loop after a commit, or after the loop.

        >>> job.evaluate(test_set, lambda batch: {"loss": loss(batch)}, batch_size=64)     # doctest: +SKIP
        {'loss': 0.41}
        """
        self.begin()
        return evaluate(self, dataset, function, batch_size, collate_fn)
