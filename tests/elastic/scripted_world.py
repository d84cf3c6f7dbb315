"""Workers in threads of one process, with a script in the place of the agents."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elastic_training import Mean
from torch import nn
from torch.nn import functional as F

from phalanx import protocol as ms
from phalanx.comm.stores import MemoryStore
from phalanx.elastic import Callbacks, DataOptions, Guard, Job, RunOptions, Saves, VerifySlots
from phalanx.elastic import _job as job_module
from phalanx.elastic.membership._store_coordinator import StoreCoordinator


class Die(BaseException):
    """What ends a worker of these tests as SIGKILL would."""


class Rows(torch.utils.data.Dataset):
    def __init__(self, length: int = 131) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = torch.randint(0, 5, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class World:
    """The store, the script's side of the agents' keys, and the worker threads."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.root = MemoryStore()
        self.keys = self.root.namespace(ms.job_prefix("j"))
        self.results: dict[str, object] = {}
        self.news: list[object] = []
        self.newcomers: list[str] = []
        self.leavers: list[str] = []
        self.threads: list[threading.Thread] = []
        self.num_steps = 15  # three epochs
        self.saves: Saves | None = None
        self.guard = Guard()
        self.verify_slots: VerifySlots | None = None
        self.hold = 3600.0
        self.is_over = False
        """Whether the test was given up: workers that still run end at their next batch, and disturb no other test."""
        self.make_dataset = Rows
        self.prepare: Callable[[nn.Module], nn.Module] = lambda model: model
        self.before_steps: Callable[[Job], None] = lambda job: None
        self.data = DataOptions()
        self._local = threading.local()
        monkeypatch.setattr(job_module, "make_coordinator", lambda group, comm_timeout: self._local.coordinator)

    def agree(self, generation: int, *workers: str) -> None:
        node = ms.MemberNode("n", 1, "h", "", 0, len(workers), worker_ids=workers)
        record = ms.Members(generation, (node,))
        self.keys.set(ms.members_key(generation), record.to_json())

    def break_(self, generation: int, *lost: str) -> None:
        self.keys.set(ms.broken_key(generation), ms.Broken(reason="the script says so", workers=lost).to_json())

    def start(
        self,
        worker: str,
        generation: int = 0,
        on_step=lambda job, step: None,
        after=None,
        on_commit=lambda job, step, outcome: None,
    ) -> None:
        def main() -> None:
            self._local.coordinator = StoreCoordinator(
                self.root.clone(), "j", worker, generation, timeout=200.0, comm_timeout=200.0
            )
            try:
                self.results[worker] = self.train(on_step, after, on_commit)
                self.keys.set(ms.ended_key(worker), b"1")  # as its agent would, when it sees code 0
            except (Die, SystemExit, Exception) as error:
                self.results[worker] = error

        self.threads.append(threading.Thread(target=main, daemon=True))
        self.threads[-1].start()

    def await_newcomer(self) -> None:
        """In a worker's thread: until this worker knows that it is to regroup at a boundary, or somebody has come."""
        self._await(lambda: self._local.coordinator.signals.wish or self.newcomers, "no worker asked for a place")

    def await_end_of_group(self) -> None:
        """In a worker's thread: until this worker knows that its generation is over."""
        self._await(lambda: self._local.coordinator.signals.broken, "nobody said that the generation is over")

    def _await(self, is_known: Callable[[], object], otherwise: str) -> None:
        until = time.monotonic() + 200
        while not is_known():
            assert time.monotonic() < until, otherwise
            self.check_time()
            time.sleep(0.01)

    def train(self, on_step, after, on_commit) -> object:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        model.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        model = self.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        callbacks = Callbacks(
            on_regroup=self.news.append, on_newcomer=self.newcomers.append, on_leave=self.leavers.append
        )
        run = RunOptions(progress=False, verify=True, log_dir=self.directory, hold=self.hold)
        job = Job(
            model,
            optimizer,
            self.make_dataset(),
            num_slots=8,
            slot_batch_size=4,
            data=self.data,
            saves=self.saves,
            guard=self.guard,
            verify_slots=self.verify_slots,
            run=run,
            callbacks=callbacks,
            state={"mean": (mean := Mean(model))},
        )
        try:
            self.before_steps(job)
            for step in job.steps(max_steps=self.num_steps):
                for micro in step:
                    self.check_time()
                    micro.backward(F.cross_entropy(model(micro.inputs), micro.targets))
                on_step(job, step)
                outcome = step.commit(max_grad_norm=1.0)
                if outcome:
                    mean.update(model)
                on_commit(job, step, outcome)
            return after(job) if after is not None else job.digest()
        finally:
            job.close()

    def join(self) -> dict[str, object]:
        try:
            for thread in self.threads:
                thread.join(200)
                assert not thread.is_alive(), "a worker hangs"
        except BaseException:
            self.is_over = True
            raise
        return self.results

    def check_time(self) -> None:
        if self.is_over:
            raise Die
