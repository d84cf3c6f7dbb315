"""Trains a model while workers die, leave or join, with the bits of an undisturbed run.

Owns the loop and the parts of the job. Who the other workers are, and how that changes, is ``membership``'s business,
what a step computes ``_step``'s, what a state is ``checkpoint``'s.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx._torch_faults import check_fused
from phalanx.data import ElasticBatchSampler
from phalanx.elastic._boundary import Boundary
from phalanx.elastic._evaluate import evaluate
from phalanx.elastic._guard import Guard
from phalanx.elastic._guarding import Guarding
from phalanx.elastic._loading import Fetcher, Loading, Schedule
from phalanx.elastic._options import Callbacks, DataOptions, RunOptions, Saves
from phalanx.elastic._step import Outcome, Step
from phalanx.elastic._telling import Telling
from phalanx.elastic.checkpoint._saving import Saving, no_readable_save
from phalanx.elastic.checkpoint._state import State, Stateful, StatefulObjects, digest
from phalanx.elastic.checkpoint._state_codec import copy_encoded
from phalanx.elastic.membership._final_state import Encoded
from phalanx.elastic.membership._leave import fail_at_exit, has_ended_well
from phalanx.elastic.membership._regroup import Regrouping
from phalanx.elastic.membership._store_coordinator import make_coordinator
from phalanx.elastic.membership._sync import BitsWarning, describe_model, differences, fingerprint
from phalanx.elastic.reduce._buffers import Buffers
from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._partials import Pool
from phalanx.elastic.tools._audit_log import Audit
from phalanx.elastic.tools._status_line import StatusLine
from phalanx.errors import CommError
from phalanx.events._event_types import Resumed, TrainingFinished, TrainingStarted
from phalanx.events._troubles import Troubles
from phalanx.events._writer import EventLog

MAX_WORKERS = 1024


class Job:
    """An elastic training job; the loop stays a plain loop.

    >>> job = Job(model, optimizer, dataset, num_slots=8, slot_batch_size=16, seed=0)     # doctest: +SKIP
    >>> for step in job.steps(epochs=3):                                                  # doctest: +SKIP
    ...     for micro in step:
    ...         micro.backward(loss_fn(model(micro.inputs), micro.targets))
    ...     step.commit()

    ``num_slots`` is the number of logical workers: the result depends on it, never on the number of processes.
    ``scheduler`` steps once per committed step; ``scaler`` is a ``torch.amp.GradScaler``; ``state`` names further
    objects with ``state_dict`` and ``load_state_dict`` that belong to the job.
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
        data: DataOptions = DataOptions(),  # noqa: B008  # a frozen value
        saves: Saves | None = None,
        run: RunOptions = RunOptions(),  # noqa: B008  # a frozen value
        callbacks: Callbacks = Callbacks(),  # noqa: B008  # a frozen value
        guard: Guard = Guard(),  # noqa: B008  # a frozen value
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
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        _check_optimizer(optimizer, model)
        others = {"scheduler": scheduler, "scaler": scaler}
        self._parts = StatefulObjects(
            model, optimizer, {**{k: v for k, v in others.items() if v is not None}, **(state or {})}
        )
        self._objects = frozenset(state or {})
        self.buffers = Buffers(model)
        self.pool = Pool(FlatLayout.of(self.params, self.buffers.live(), num_slots), MAX_WORKERS)
        self.guarding = Guarding(self, guard)
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
        path = logs and logs / f"events-{name}.jsonl"
        self.events = EventLog(path, worker=coordinator.worker_id, troubles=self.troubles)
        self.progress = StatusLine(run.progress)
        self.saving = Saving(saves, self.events, self.troubles)
        self.regrouping: Regrouping = Regrouping(self, coordinator)
        self.is_fresh = True
        """Whether this worker has no state yet that counts; another's or a save's may replace its own."""
        self.loss: float | None = None
        """Loss of the last committed step."""
        self.grad_norm: float | None = None
        """Its gradient's norm before clipping, if it was clipped."""
        self.boundary = Boundary()
        self.telling = Telling(self)
        self.num_evaluations = 0
        self.last_evaluation: dict[str, float] = {}
        self._has_looped = False
        self._resumes = 0
        self.attempt = 0
        """The number of this run of the job from its beginning or from a save; see ``Audit``."""
        self._read_ahead: tuple[int, int, int] | None = None

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of committed steps."""
        return self.schedule.step

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
    def worker_id(self) -> str:
        return self.regrouping.coordinator.worker_id

    @property
    def lineage(self) -> list[int]:
        """Return what tells this attempt at a step from earlier ones; later is larger."""
        return [
            self.attempt,
            self.regrouping.membership.generation,
            self.regrouping.membership.round,
            *self.guarding.attempt,
        ]

    @property
    def is_before_evaluation(self) -> bool:
        """Return whether this worker still has to come to an evaluation that the others are in."""
        return self.boundary.is_evaluating

    def identity(self) -> dict[str, Any]:
        """Return what must be equal on all workers; ``model`` stands for all of its parameters and buffers."""
        sampler = self.schedule.sampler
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        return {
            "num_slots": self.num_slots,
            "slot_batch_size": self.slot_batch_size,
            "seed": self.seed,
            "steps_per_epoch": sampler.steps_per_epoch,
            "order": sampler.order.name,
            "tail": sampler.tail,
            "parts": self.schedule.num_parts,
            "guard": self.guarding.guard.nonfinite,
            "model": digest(list(describe_model(self.model).items())),
            "optimizer": f"{type(self.optimizer).__name__} of {'+'.join(map(str, groups))} parameters",
        }

    def digest(self) -> str:
        """sha256 over weights, optimizer state, the other objects' state and the data position."""
        return digest({"parts": self._capture(), "sampler": self.schedule.state_dict()})

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(self, epochs: int | None = None, *, max_steps: int | None = None) -> Iterator[Step]:
        """Return the steps that are not committed yet, up to a number of epochs or of steps, whichever comes first.

        A step that could not be committed because a worker was lost comes again, or was taken over from a worker that
        had committed it: ``step.commit()`` says which (``Outcome``).
        """
        if epochs is None and max_steps is None:
            raise ValueError("steps() needs epochs or max_steps; expected an end")
        if self._has_looped and self.regrouping.coordinator.can_change:
            raise RuntimeError(
                "steps() was called again after its end; a worker that joins could not tell which loop it is in. "
                "Use one loop, and job.evaluate() inside it (step.is_last_of_epoch) or after it"
            )
        with self.regrouping.leave.listen():
            try:
                self.begin()
                while not self._is_over(epochs, max_steps):
                    self._check_frozen()
                    self._follow_data()
                    self.buffers.begin_step()
                    self.guarding.begin_step()
                    step = Step(self)
                    yield step
                    self.take_held_objects()
                    if step.committed:
                        self.telling.tell(step)
                        self.regrouping.cross_boundary(wish=step.wish, num_leaving=step.num_leaving)
                    elif step.dropped:
                        self._read_ahead = None  # it is read once more
                        self.telling.tell_again()
                    else:
                        raise RuntimeError(f"step {step.number} was not committed; call step.commit() in the loop")
                self.guarding.check_state()
                self.regrouping.part()
                self._has_looped = True
                self.telling.tell_again()
                self.events.write(TrainingFinished(step=self.step))
                self.audit.ended(self.lineage, self.step)
                self.loading.close()
                self.saving.settle()
                self.progress.close()
                atexit.register(self._at_exit)  # not now: an evaluation may follow
            except BaseException:
                self.close()
                raise

    def begin(self) -> None:
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
        self.events.write(TrainingStarted(pid=os.getpid()))
        self.regrouping.begin()

    def close(self) -> None:
        """End threads, files and the group; the state stays in memory and can be looked at and saved.

        The end of the process does it. Done earlier, a worker that dies later cannot take the state from this one.
        """
        atexit.unregister(self._at_exit)
        self.loading.close()
        self.saving.settle()
        self.progress.close()
        self.regrouping.close()
        self.audit.close()
        self.events.close()
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
            or (epochs is not None and self.epoch >= epochs)
            or (max_steps is not None and self.step >= max_steps)
        )

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name} did not require a gradient when the job was made and does now; make the job after "
                    "unfreezing, or set requires_grad before and leave the parameter out of the optimizer"
                )

    def _follow_data(self) -> None:
        """Have the loader read along our slots, anew after a regroup and at the beginning of an epoch."""
        now = (self.generation, self.regrouping.membership.round, self.epoch)
        if now != self._read_ahead:
            slots = self.regrouping.reduction.slots
            self.loading.follow(lambda: self.schedule.ahead(slots))
            self._read_ahead = now

    def advance(self, step: Step) -> None:
        """Move everything else along: the optimizer has stepped. For ``Step`` only."""
        self.schedule.sampler.commit(step.number)
        if self.scheduler is not None:
            self.scheduler.step()  # type: ignore[attr-defined]  # every scheduler has it; Stateful asks for less
        self.loss, self.grad_norm = step.loss, step.grad_norm
        self.boundary.commit()
        self.audit.committed(self.lineage, step.epoch, step.number)
        self.regrouping.coordinator.report(self.step)
        self.regrouping.coordinator.note_commit(self.regrouping.membership, self.step)

    def recover_from(self, step: Step, cause: CommError) -> Outcome:
        """Return the group was lost during a step: form it anew, and say what has become of the step. For ``Step``
        only."""
        self.boundary.is_in_step = True
        try:
            self.regrouping.recover(cause)
        finally:
            self.boundary.is_in_step = False
        if self.step == step.number:
            return Outcome.DROPPED
        step.adopt()
        return Outcome.ADOPTED

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

    # -- state ------------------------------------------------------------------------------------------------

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
            "seed": self.seed,
            "machine": fingerprint(),
        }

    def copy_state(self) -> Encoded:
        """Return a copy of the state in main memory, taken after the last step: the gradients' memory is given up for
        it."""
        self.pool.free.clear()
        return copy_encoded(self.state_dict())

    def load_state_dict(self, state: State) -> None:
        """Become ``state``. The tensors in it may be taken over; do not use them afterwards."""
        self.take_state(state)
        self.begin_attempt(parent=self.attempt)

    def take_state(self, state: State) -> None:
        """As ``load_state_dict``, for the state of another worker of the same attempt."""
        self._load(state, but=())
        self.boundary.load_state_dict(state.get("boundary", {"results": []}))

    def take_over(self, state: State) -> None:
        """Become what another worker is; in mid-step, only what a commit changes. For ``bring_level`` only."""
        objects = {name: value for name, value in state["parts"]["others"].items() if name in self._objects}
        if self.boundary.is_in_step and not self.is_fresh:
            self._load(state, but=self._objects)
            self.boundary.adopt(state["boundary"], objects)
        else:
            self.take_state(state)

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

    def _load(self, state: State, but: frozenset[str] | tuple[()]) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a job with seed {state['seed']}, this one has {self.seed}")
        self._parts.apply(state["parts"], but=but)
        self.schedule.load_state_dict(state["sampler"])
        self._resumes = state["resumes"]
        self.attempt = state.get("attempt", self._resumes)
        self.num_evaluations, self.last_evaluation = state["evaluations"]
        self.loss, self.grad_norm = state["loss"], state.get("grad_norm")
        self.is_fresh = False

    def save(self, *, wait: bool = True) -> None:
        """Write the state to the saves' directory; without ``wait`` in the background.

        Raises:
            NonFinite: the state is not finite (see ``Guard``); it is not saved.
            OSError: with ``wait``, the disk does not take it. Else it is tried again, and training goes on.
        """
        self.guarding.check_state()
        self.saving.submit(self.step, self.state_dict())
        if wait:
            self.saving.wait_idle()

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
        if listed := differences(state["machine"], fingerprint()):
            warnings.warn(
                f"the save and this worker differ in {listed}: what follows is computed otherwise than what was "
                "saved. For equal bits resume alike (RunOptions(threads=1) sets the threads)",
                BitsWarning,
                stacklevel=2,
            )
        self.load_state_dict({**state, "resumes": state["resumes"] + 1})
        self.events.write(Resumed(step=self.step))
        return True

    def begin_attempt(self, parent: int | None = None) -> None:
        """Nobody has a state in memory: a new attempt begins, with the state that ``parent`` saved or from nothing.

        Its number is the time, so that it is larger than that of any attempt before, also of one that was begun from
        another save or whose save is gone.
        """
        self.attempt = max((parent or 0) + 1, time.time_ns() // 1_000_000)
        self.audit.attempt(self.attempt, self.step, parent)


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    check_fused(optimizer, "Job")
    known = {id(p) for p in model.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ValueError(
                    f"the optimizer's group {i} holds a parameter of shape {tuple(param.shape)} that is not the "
                    "model's; build the optimizer from model.parameters() of the same model"
                )
