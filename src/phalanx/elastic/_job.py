"""Job: training that goes on when workers die, leave or join, with the bits of an undisturbed run.

Owns the loop: it hands out steps, and between and inside them takes a new seat (``_roster``), brings all workers to the
same state (``_sync``) and goes on. What a step computes is ``_step``'s business, what a state is ``_state``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data import ElasticBatchSampler
from phalanx.errors import CommError

from ._buffers import Buffers
from ._exchange import Exchange
from ._layout import SCALARS, Layout
from ._leave import LeaveRequest
from ._loading import Fetcher, Loading
from ._options import Callbacks, DataOptions, Regrouped, RunOptions, Saves
from ._partials import Pool
from ._progress import Progress
from ._records import Audit, Events
from ._roster import JobOver, make_roster
from ._saving import Saving
from ._schedule import Schedule
from ._seats import Ready, Seat
from ._state import Parts, State, Stateful, digest
from ._step import LOST, Step
from ._sync import bring_level, fingerprint

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
        self._parts = Parts(model, optimizer, {**{k: v for k, v in others.items() if v is not None}, **(state or {})})
        self.buffers = Buffers(model)
        self.pool = Pool(Layout.of(self.params, self.buffers.live()), MAX_WORKERS)
        sampler = ElasticBatchSampler(
            dataset, num_slots, slot_batch_size, slots=(), shuffle=data.shuffle, seed=seed, tail=data.tail
        )
        self.schedule = Schedule(sampler, data.parts)
        self.loading = Loading(Fetcher(dataset, data.collate_fn, seed), data.num_workers)
        self.roster = make_roster(run.group, comm_timeout=run.timeout)
        logs = None if run.log_dir is None else Path(run.log_dir)
        name = self.roster.worker_id.replace("/", "_")
        self.audit = Audit(logs and logs / f"audit-{name}.jsonl")
        self.events = Events(logs and logs / f"events-{name}.jsonl", self.roster.worker_id)
        self.progress = Progress(run.progress)
        self.saving = Saving(saves, self.events)
        self.leave = LeaveRequest()
        self._seat: Seat | None = None
        self._exchange: Exchange | None = None
        self.is_fresh = True
        self._resumes = 0
        self._read_ahead: tuple[int, int, int] | None = None

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.schedule.step

    @property
    def epoch(self) -> int:
        return self.schedule.epoch

    @property
    def generation(self) -> int:
        return self.seat.generation

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def world_size(self) -> int:
        return len(self.seat.workers)

    @property
    def seat(self) -> Seat:
        if self._seat is None:
            raise RuntimeError("the job has not begun; it joins the other workers when its first step is asked for")
        return self._seat

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None, "a seat comes with an exchange"
        return self._exchange

    @property
    def lineage(self) -> list[int]:
        """What tells this attempt at a step from earlier ones; later is larger."""
        return [self._resumes, self.seat.generation, self.seat.round]

    @property
    def num_carriers(self) -> int:
        return min(self.world_size, self.num_slots)

    def digest(self) -> str:
        """sha256 over weights, optimizer state, the other objects' state and the data position."""
        return digest({"parts": self._parts.capture(), "sampler": self.schedule.state_dict()})

    # -- the loop ---------------------------------------------------------------------------------------------

    def steps(self, epochs: int | None = None, *, max_steps: int | None = None) -> Iterator[Step]:
        """The steps that are not committed yet, up to a number of epochs or of steps, whichever comes first.

        A step that could not be committed because a worker was lost comes again; ``step.commit()`` returned False.
        """
        if epochs is None and max_steps is None:
            raise ValueError("steps() needs epochs or max_steps; expected an end")
        with self.leave.listen():
            try:
                self.begin()
                while not self._is_over(epochs, max_steps):
                    self._check_frozen()
                    self._follow_data()
                    self.buffers.begin_step()
                    step = Step(self)
                    yield step
                    if step.committed:
                        self._cross_boundary(step)
                    elif not step.dropped:
                        raise RuntimeError(f"step {step.number} was not committed; call step.commit() in the loop")
                self._part_together()
            finally:
                self.close()

    def begin(self) -> None:
        """Join the other workers and take their state; ``steps`` does it."""
        if self._seat is not None:
            return
        self.audit.begin(
            {
                "num_slots": self.num_slots,
                "steps_per_epoch": self.schedule.sampler.steps_per_epoch,
                "num_samples_per_epoch": self.schedule.num_samples_per_epoch,
            }
        )
        self.events.emit("started")
        began = time.monotonic()
        self._settle(lambda: self.roster.first_seat(self._ready()), began)

    def close(self) -> None:
        """End threads and files; the state stays in memory and can be looked at and saved."""
        self.loading.close()
        self.saving.wait_idle()
        self.progress.close()
        self.roster.close()
        if self._seat is not None and self._seat.group is not None and self.run.group is None:
            self._seat.group.close()
        self.audit.close()
        self.events.close()

    def _is_over(self, epochs: int | None, max_steps: int | None) -> bool:
        return (epochs is not None and self.epoch >= epochs) or (max_steps is not None and self.step >= max_steps)

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{name} did not require a gradient when the job was made and does now; make the job after "
                    "unfreezing, or set requires_grad before and leave the parameter out of the optimizer"
                )

    def _follow_data(self) -> None:
        """Have the loader read along our slots, anew after a regroup and at the beginning of an epoch."""
        now = (self.seat.generation, self.seat.round, self.epoch)
        if now != self._read_ahead:
            slots = self.exchange.slots
            self.loading.follow(lambda: self.schedule.ahead(slots))
            self._read_ahead = now

    # -- what Step needs --------------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        return self.roster.signals.broken is not None

    def check_group(self) -> None:
        if self.roster.signals.broken is not None:
            raise self.roster.signals.broken

    def wishes(self) -> Tensor:
        """This worker's part of the numbers that ride along: whether it wants to regroup, whether it leaves."""
        if self.leave.requested and not self.leave.announced:
            self.roster.announce_leaving(self.seat)
            self.leave.announced = True
        wish = float(self.roster.signals.wish or self.leave.requested)
        values = {"wish": wish, "leaving": float(self.leave.requested)}
        return torch.tensor([values.get(name, 0.0) for name in SCALARS], device=self.pool.layout.device)

    def advance(self, step: Step) -> None:
        """The optimizer has stepped: move everything else along."""
        self.schedule.sampler.commit(step.number)
        if self.scheduler is not None:
            self.scheduler.step()  # type: ignore[attr-defined]  # every scheduler has it; Stateful asks for less
        self.audit.committed(self.lineage, step.epoch, step.number)
        self.roster.report(self.step)

    def recover(self, cause: CommError) -> None:
        """The group is gone: take a seat in the next generation and bring everyone to the same state."""
        began = time.monotonic()
        self.events.emit("lost", generation=self.generation, step=self.step, reason=str(cause))
        self._settle(lambda: self.roster.seat_after_loss(self.seat, self._ready(), cause), began)

    # -- boundaries and regroups ------------------------------------------------------------------------------

    def _cross_boundary(self, step: Step) -> None:
        if self.rank == 0:
            assert step.loss is not None or step.num_samples == 0, "a committed step has a loss"
            self.progress.show(self, step)
            self.events.emit(
                "step", step=step.number, epoch=step.epoch, loss=step.loss, samples=step.num_samples,
                generation=self.generation, world_size=self.world_size,
            )  # fmt: skip
        if self.saving.is_due(self.step) and self.rank == 0:
            self.save(wait=False)
        if not step.wish:
            return
        everyone = step.all_leave or not self.roster.can_change
        if step.leaving and everyone and self.rank == 0 and self.saving.options is not None:
            self.save()
        if self.leave.requested or (step.leaving and everyone):
            self.events.emit("left", step=self.step, generation=self.generation)
            self.roster.step_aside(self.seat)
            raise SystemExit(0)
        began = time.monotonic()
        self._settle(lambda: self.roster.seat_at_boundary(self.seat, self._ready()), began)

    def _part_together(self) -> None:
        """Nobody may end before all have committed the last step: one that is behind needs the others."""
        while True:
            try:
                self.check_group()
                self.roster.waiting(True)
                if self.seat.group is not None:
                    self.seat.group.barrier()
                self.roster.declare_done()
                return
            except LOST as error:
                if self.roster.is_over_after(self.seat, error):
                    return  # the others got through: all had committed
                self.recover(error)

    def _ready(self) -> Ready:
        if self.is_fresh:
            return Ready()
        return Ready(step=self.step, peers=self.seat.workers)

    def _settle(self, take_seat: Callable[[], Seat], began: float) -> None:
        """Sit down: agree on the state with everyone in the round, or move on if that fails too."""
        before = self._seat
        while True:
            try:
                seat = take_seat()
            except JobOver:
                raise SystemExit(0) from None  # without the state, what follows the loop makes no sense here
            self._seat = seat
            try:
                self._exchange = Exchange(seat.group, self.num_slots, self.pool)
                self.roster.waiting(True)
                bring_level(self, seat)
                self.roster.waiting(False)
                break
            except LOST as error:
                take_seat = partial(self.roster.seat_after_loss, seat, self._ready(), error)
        self.is_fresh = False
        self._tell(before, seat, time.monotonic() - began)

    def _tell(self, before: Seat | None, seat: Seat, seconds: float) -> None:
        old = before.workers if before is not None else ()
        news = Regrouped(
            generation=seat.generation,
            round=seat.round,
            workers=seat.workers,
            joined=tuple(w for w in seat.workers if w not in old),
            left=tuple(w for w in old if w not in seat.workers),
            step=self.step,
            seconds=seconds,
        )
        self.events.emit("regrouped", **{**vars(news), "rank": seat.rank, "machine": fingerprint()})
        if before is None:
            return
        if self.callbacks.on_regroup is not None:
            self.callbacks.on_regroup(news)
        for callback, workers in ((self.callbacks.on_newcomer, news.joined), (self.callbacks.on_leave, news.left)):
            for worker in workers if callback is not None else ():
                callback(worker)  # type: ignore[misc]  # the condition is in the line above

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything that decides what the next step computes; its tensors are the live ones."""
        return {
            "parts": self._parts.capture(),
            "sampler": self.schedule.state_dict(),
            "resumes": self._resumes,
            "seed": self.seed,
            "machine": fingerprint(),
        }

    def load_state_dict(self, state: State) -> None:
        """Become ``state``. The tensors in it may be taken over; do not use them afterwards."""
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of a job with seed {state['seed']}, this one has {self.seed}")
        self._parts.apply(state["parts"])
        self.schedule.load_state_dict(state["sampler"])
        self._resumes = state["resumes"]
        self.is_fresh = False

    def save(self, *, wait: bool = True) -> None:
        """Write the state to the saves' directory; without ``wait`` in the background."""
        self.saving.submit(self.step, self.state_dict())
        if wait:
            self.saving.wait_idle()

    def load_save(self) -> bool:
        """Take the newest readable save, if there is one; the workers' first seat does it by itself."""
        state = self.saving.load()
        if state is None:
            return False
        self.load_state_dict({**state, "resumes": state["resumes"] + 1})
        self.events.emit("resumed", step=self.step)
        return True


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ValueError(
                    f"the optimizer's group {i} holds a parameter of shape {tuple(param.shape)} that is not the model's; "
                    "build the optimizer from model.parameters() of the same model"
                )


