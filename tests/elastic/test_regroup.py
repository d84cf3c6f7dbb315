"""Regroups of workers in threads of one process, with a script in the place of the agents: every order of events that
matters, forced by the script. Real processes and real agents are in ``test_faults``."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx import membership as ms
from phalanx.comm.stores import MemoryStore
from phalanx.elastic import Callbacks, Ejected, Job, RunOptions
from phalanx.elastic import _job as job_module
from phalanx.elastic._store_roster import StoreRoster
from phalanx.elastic.audit import check_directory

pytestmark = [pytest.mark.fast, pytest.mark.timeout(60)]


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
        self.threads: list[threading.Thread] = []
        self.num_steps = 15  # three epochs
        self._local = threading.local()
        monkeypatch.setattr(job_module, "make_roster", lambda group, comm_timeout: self._local.roster)

    def agree(self, generation: int, *workers: str) -> None:
        members = tuple(
            ms.Member(id=w, rank=i, node_rank=0, local_rank=i, local_size=len(workers), host="h")
            for i, w in enumerate(workers)
        )
        record = ms.Members(
            generation=generation, workers=members, num_nodes=1, master_addr="", master_port=0
        )
        self.keys.set(ms.members_key(generation), record.to_json())

    def break_(self, generation: int, *lost: str) -> None:
        self.keys.set(
            ms.broken_key(generation), ms.Broken(reason="the script says so", workers=lost).to_json()
        )

    def start(self, worker: str, generation: int = 0, on_step=lambda job, step: None, after=None) -> None:
        def main() -> None:
            self._local.roster = StoreRoster(
                self.root.clone(), "j", worker, generation, timeout=20.0, comm_timeout=20.0
            )
            try:
                self.results[worker] = self.train(on_step, after)
            except (Die, SystemExit, Exception) as error:
                self.results[worker] = error

        self.threads.append(threading.Thread(target=main, daemon=True))
        self.threads[-1].start()

    def train(self, on_step, after) -> object:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        callbacks = Callbacks(on_regroup=self.news.append)
        run = RunOptions(progress=False, verify=True, log_dir=self.directory)
        job = Job(model, optimizer, Rows(), num_slots=8, slot_batch_size=4, run=run, callbacks=callbacks)
        try:
            for step in job.steps(max_steps=self.num_steps):
                for micro in step:
                    micro.backward(F.cross_entropy(model(micro.inputs), micro.targets))
                on_step(job, step)
                step.commit(max_grad_norm=1.0)
            return after(job) if after is not None else job.digest()
        finally:
            job.close()

    def join(self) -> dict[str, object]:
        for thread in self.threads:
            thread.join(50)
            assert not thread.is_alive(), "a worker hangs"
        return self.results


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        world = World(tmp_path_factory.mktemp("alone"), patch)
        world.agree(0, "a")
        world.start("a")
        return world.join()["a"]


def die_at(number, then=lambda: None):
    def on_step(job, step):
        if step.number == number:
            then()
            raise Die

    return on_step


def test_three_workers_without_any_fault(world, alone):
    world.agree(0, "a", "b", "c")
    for worker in "abc":
        world.start(worker)
    assert world.join() == dict.fromkeys("abc", alone)
    assert world.news == [], "the first seat is no regroup"


def test_survivors_go_on_and_the_replacement_gets_its_seat_at_a_boundary(world, alone):
    world.agree(0, "a", "b", "c")
    back_at_work = threading.Event()

    def watch(job, step):
        if step.number == 7:
            back_at_work.set()

    def heal():
        world.break_(0, "b")
        world.agree(1, "a", "d", "c")

    world.start("a", on_step=watch)
    world.start("b", on_step=die_at(4, heal))
    world.start("c")
    assert back_at_work.wait(40), "survivors did not wait for d, which has not even begun"
    world.start("d", 1)
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"] == alone
    assert results["d"] == alone or isinstance(results["d"], SystemExit), "it joined, or came after the end"
    first = world.news[0]
    assert (first.workers, first.left, first.joined) == (("a", "c"), ("b",), ())
    verdict = check_directory(world.directory)
    assert verdict.problems == []
    assert verdict.num_dropped > 0


def test_a_generation_that_breaks_while_it_forms_is_skipped(world, alone):
    """b dies in generation 0, c before it takes its seat in generation 1; a goes on alone in generation 2."""
    world.agree(0, "a", "b", "c")

    def both_die():
        world.break_(0, "b")
        world.agree(1, "a", "c")
        world.break_(1, "c")
        world.agree(2, "a")

    world.start("a")
    world.start("b", on_step=die_at(3, both_die))
    world.start("c", on_step=die_at(3))
    results = world.join()
    assert results["a"] == alone
    assert world.news[0].generation == 2
    assert check_directory(world.directory).problems == []


def test_an_ejected_worker_is_told_so(world, alone):
    world.agree(0, "a", "b")

    def eject():
        world.break_(0, "b")
        world.agree(1, "a")

    def on_step(job, step):
        if step.number == 2 and job.generation == 0:
            eject()

    world.start("a", on_step=on_step)
    world.start("b")
    results = world.join()
    assert results["a"] == alone
    assert isinstance(results["b"], Ejected)
    assert "not among the members of generation 1" in str(results["b"])


def test_a_polite_leave_drops_no_step(world, alone):
    world.agree(0, "a", "b", "c")

    def leave(job, step):
        if step.number == 3:
            job.team.leave.requested = True  # what SIGTERM does in the main thread

    world.start("a")
    world.start("b", on_step=leave)
    world.start("c")
    world.threads[1].join(40)
    assert isinstance(world.results["b"], SystemExit)
    assert world.results["b"].code == 0
    world.agree(1, "a", "c")  # the agent plans without it, and breaks the generation once it has gone
    world.break_(0)
    results = world.join()
    assert results["a"] == results["c"] == alone
    verdict = check_directory(world.directory)
    assert verdict.problems == []
    assert verdict.num_dropped == 0


def test_an_evaluation_survives_a_death_and_newcomers_stay_out_of_it(world):
    """Every batch is scored at least once and counted once; the mean is that of one worker."""
    lock, scored = threading.Lock(), []

    def evaluate(dies_after=None):
        def run(job):
            def score(batch):
                with lock:
                    mine = job.worker_id
                    scored.append(mine)
                    if dies_after is not None and scored.count(mine) > dies_after:
                        world.break_(0, "b")
                        world.agree(1, "a", "x", "c")
                        raise Die
                return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

            return job.evaluate(Rows(64), score, batch_size=4)["loss"]

        return run

    world.agree(0, "a", "b", "c")
    world.start("a", after=evaluate())
    world.start("b", after=evaluate(dies_after=2))
    world.start("c", after=evaluate())
    results = world.join()
    assert isinstance(results["b"], Die)
    assert results["a"] == results["c"]
    counts = {worker: scored.count(worker) for worker in "abc"}
    assert counts["a"] + counts["c"] == 16, "what b had not told about was scored by the others"

    with pytest.MonkeyPatch.context() as patch:
        lone = World(world.directory / "lone", patch)
        lone.agree(0, "a")
        lone.start("a", after=evaluate())
        assert lone.join()["a"] == results["a"]


def test_who_comes_after_the_end_goes_away_with_code_0(world, alone):
    world.agree(0, "a")
    world.start("a")
    assert world.join() == {"a": alone}
    world.agree(1, "z")
    world.start("z", 1)
    late = world.join()["z"]
    assert isinstance(late, SystemExit)
    assert late.code == 0


def test_a_hundred_regroups_leave_nothing_behind(world):
    """Every step boundary is a regroup; threads, files and memory must not grow with their number."""
    num_regroups, seen = 100, []

    def watch(job, step):
        if job.rank == 0 and job.generation in (30, num_regroups):
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096 / 2**20))

    for generation in range(num_regroups + 1):
        world.agree(generation, "a", "b")
        if generation < num_regroups:
            world.keys.set(ms.wanted_key(generation), ms.Broken(reason="again").to_json())
    world.num_steps = num_regroups + 3
    world.start("a", on_step=watch)
    world.start("b")
    results = world.join()
    assert results["a"] == results["b"]
    assert isinstance(results["a"], str)
    assert max(news.generation for news in world.news) == num_regroups
    (files, threads, memory), *_, (files_later, threads_later, memory_later) = seen
    assert files_later <= files + 4
    assert threads_later <= threads + 2
    assert memory_later <= memory + 24, "MB"
