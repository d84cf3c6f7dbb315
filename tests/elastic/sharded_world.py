"""Sharded workers in threads of one process, with a script in the place of the agents, and faults at any collective."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scripted_world import Die, World
from sharded_training import make_job, weights
from torch.nn import functional as F

from phalanx.comm import observe
from phalanx.elastic import Guard, RunOptions

COMMIT_POINT = 14
"""Which collective of a step it is, of three workers. All units are gathered together (one collective before it and one
behind it). Eight slots are three waves, in each of which the three units are reduced (one each), in the last by two
workers with a follower. Then numbers, buffers and mirrored gradients, then this."""


@dataclass
class Fault:
    """``worker`` dies when it issues collective number ``at`` of step ``step``.

    With ``when`` it dies at the first collective of that name, from that step on, in a later generation than 0.
    """

    worker: str
    step: int
    at: int
    survivors: tuple[str, ...] = ()
    when: str = ""
    is_done: bool = False
    name: str = ""
    """Which collective it was."""


@dataclass
class Told:
    """What a worker saw."""

    outcomes: list[Any] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    collectives: dict[int, int] = field(default_factory=dict)
    """By step, how many collectives it issued."""


class ShardedWorld(World):
    copies: Any = 2
    kind = "adamw"
    clip: float | None = 0.5
    num_steps = 8
    faults: tuple[Fault, ...] = ()
    told: dict[str, Told]
    guard = Guard()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_steps = 8
        self.told = {}
        self.here = threading.local()

    def train(self, on_step: Any, after: Any, on_commit: Any) -> object:
        run = RunOptions(progress=False, verify=True, log_dir=self.directory, hold=self.hold, threads=1)
        job = make_job(
            self.kind,
            copies=self.copies,
            run=run,
            saves=self.saves,
            is_random=False,
            guard=self.guard,
            verify_slots=self.verify_slots,
        )
        told = self.told[job.worker_id] = Told()
        self.here.job, self.here.step, self.here.told = job, -1, told
        try:
            for step in job.steps(max_steps=self.num_steps):
                self.here.step = step.number
                on_step(job, step)
                for micro in step:
                    self.check_time()
                    micro.backward(self.loss(job, micro))
                outcome = step.commit(max_grad_norm=self.clip)
                told.outcomes.append((step.number, outcome.value))
                if outcome:
                    job.count.update(job.model)
                    told.steps.append((step.number, step.loss, step.grad_norm, step.num_samples))
                on_commit(job, step, outcome)
            self.here.step = self.num_steps  # what follows the loop
            return after(job) if after is not None else weights(job)
        finally:
            self.here.job = None
            job.close()

    def loss(self, job: Any, micro: Any) -> Any:
        return F.cross_entropy(job.model(micro.inputs), micro.targets)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let the faults happen."""

        def watch(event: Any) -> None:
            job = getattr(self.here, "job", None)
            if job is None:
                return
            step, told = self.here.step, self.here.told
            at = told.collectives.get(step, 0)
            told.collectives[step] = at + 1
            for fault in self.faults:
                is_due = (fault.worker, fault.step, fault.at) == (job.worker_id, step, at)
                if fault.when and job.worker_id == fault.worker and job.regrouping.has_begun:
                    is_due = step >= fault.step and job.generation > 0 and event.name == fault.when
                if is_due and not fault.is_done:
                    fault.is_done, fault.name = True, event.name
                    self.kill(job, fault)

        with observe(watch):
            yield

    def kill(self, job: Any, fault: Fault) -> None:
        generation = job.generation
        self.break_(generation, fault.worker)
        self.agree(generation + 1, *fault.survivors)
        raise Die

    def run(self, workers: str, on_commit: Callable[..., None] = lambda job, step, outcome: None) -> dict[str, object]:
        self.agree(0, *workers)
        with self.watching():
            for worker in workers:
                self.start(worker, on_commit=on_commit)
            return self.join()
