"""Elastic training against torchrun with torch's DDP: recovery after a kill, and what a quiet step costs.

Recovery: both jobs run at the same time with three workers each and light steps; SIGKILL goes to a random worker of
one, then of the other, in turn. Measured: kill to the next committed step, and (ours) to the first step at full size.
Both rest after a committed step, so that there are cores for the other; a step that was dropped comes again at once.
torchrun restarts all workers from their script's beginning; a job that has no new step after ``LIMIT`` seconds counts
as not recovered and is started anew.
Steady state: two processes build torch's DDP (gloo) and ours beside each other and take turns, step by step. So does
the same work without any other process (*alone*), which no way of summing gradients can be faster than.
Sharded jobs: see ``_elastic_sharded.py``.

    python -m benchmarks.elastic [--kills 20] [--torchrun-kills 20] [--rounds 20]
                                 [--sharded-rounds 12] [--sharded-kills 6] [--only sharded]
    python -m benchmarks elastic -- --only sharded          # the same, stored; the sharded rows take about ten minutes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks import _elastic_sharded as sharded
from benchmarks._results import record

SIZE = 3
PACE = 0.03
LIMIT = 40.0
MOST_LARGE_KILLS = 3
"""Kills at the largest state."""


# -- recovery ---------------------------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def sign_in(directory: Path) -> None:
    """Leave this process's number and start time, so that it can be told from a later one with the same number."""
    (directory / f"pid-{os.getpid()}").write_text(started(os.getpid()))


def started(pid: int) -> str:
    """When a living process was started; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def mark(directory: Path, attempt: int, size: int) -> None:
    """One line per committed step: when, in which attempt (restart or round), on how many workers."""
    with (directory / f"marks-{os.getpid()}").open("a") as file:
        file.write(json.dumps([time.time(), attempt, size]) + "\n")


def torch_worker(directory: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    sign_in(directory)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    while not (directory / "stop").exists():
        F.cross_entropy(model(torch.randn(8, 64)), torch.randint(0, 10, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        mark(directory, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_world_size())
        time.sleep(PACE)


def phalanx_worker(directory: Path) -> None:
    from phalanx.elastic import Job, RunOptions

    sign_in(directory)
    model = small_model()
    data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    job = Job(
        model,
        torch.optim.AdamW(model.parameters()),
        data,
        num_slots=SIZE,
        slot_batch_size=8,
        run=RunOptions(progress=False),
    )
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(F.cross_entropy(model(micro.inputs), micro.targets))
        if step.commit():
            mark(directory, job.generation, job.world_size)
            time.sleep(PACE)


class Contender:
    """A running job that can be hurt; started again when it does not recover."""

    def __init__(self, name: str, command: list[str], words: Sequence[str] = (), size: int = SIZE) -> None:
        self.name = name
        self.command = [*command, f"--nproc-per-node={size}", "--max-restarts=10000"]
        self.words = words
        self.size = size
        self.to_any: list[float] = []
        self.to_full: list[float] = []
        self.num_lost = 0
        self.why_lost: list[str] = []
        """For each kill after which the job did not go on: what it said last."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="phalanx-elastic-bench-"))
        self.log = (self.directory / "log").open("wb")
        command = [*self.command, __file__, f"{self.name}-worker", str(self.directory), *self.words]
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)
        self._wait(lambda marks: any(size == self.size for _, _, size in marks), 120.0)

    def _marks_of_workers(self) -> list[list[tuple[float, int, int]]]:
        lines = [path.read_text().splitlines(keepends=True) for path in self.directory.glob("marks-*")]
        return [[tuple(json.loads(line)) for line in each if line[-1] == "\n"] for each in lines]

    def _marks(self) -> list[tuple[float, int, int]]:
        return sorted(mark for each in self._marks_of_workers() for mark in each)

    def _wait(
        self, condition: Callable[[list[tuple[float, int, int]]], bool], limit: float, every: float = 0.01
    ) -> bool:
        until = time.monotonic() + limit
        while time.monotonic() < until and self.process is not None and self.process.poll() is None:
            if condition(self._marks()):
                return True
            time.sleep(every)
        return False

    def _alive(self) -> list[int]:
        """Workers of this job that run."""
        signed = {int(path.name[4:]): path.read_text() for path in self.directory.glob("pid-*")}
        return [pid for pid, when in signed.items() if when and started(pid) == when]

    def strike(self, chance: random.Random) -> bool:
        """Kill a worker and wait for the job to go on; whether it did."""
        alive = self._alive()
        *_, (_, attempt, before) = sorted(self._marks(), key=lambda mark: mark[1])
        for path in self.directory.glob("marks-*"):
            path.unlink()  # workers open it anew for every line
        killed = time.time()
        os.kill(chance.choice(alive), signal.SIGKILL)

        def later(marks: list[tuple[float, int, int]], size: int = 1) -> list[float]:
            return [t for t, a, s in marks if (a > attempt or s < before) and s >= size and t > killed]

        if not self._wait(lambda marks: bool(later(marks)), LIMIT):
            self.num_lost += 1
            self.why_lost.append(self._last_words())
            self.start_anew()
            return False
        self._wait(lambda marks: bool(later(marks, SIZE)), LIMIT)
        marks = self._marks()
        self.to_any.append(min(later(marks)) - killed)
        self.to_full.append(min(later(marks, SIZE), default=float("nan")) - killed)
        return True

    def _last_words(self) -> str:
        """Return whether the job has ended, and the last line of its output."""
        assert self.process is not None, "it was started"
        code = self.process.poll()
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        state = f"no step in {LIMIT:g} s" if code is None else f"it ended with {code}"
        return f"{state}: {lines[-1] if lines else 'it said nothing'}"

    def start_anew(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Have the workers rest between steps, so that all cores are another job's."""
        (self.directory / "pause").touch()

    def go_on(self) -> None:
        (self.directory / "pause").unlink(missing_ok=True)

    def settle(self, moves: sharded.Moves, limit: float) -> tuple[bool, list[tuple[float, int]]]:
        """Wait until no more cells move; whether that came, and of each step until then its time and number of workers.

        The first step that all workers of a new size take is left out: before it came the regroup.
        """
        is_over = self._wait(lambda _: moves.are_over(), limit, every=0.5)  # looking costs the job processor time
        end = moves.last()
        steps = [
            (b - a, size)
            for each in self._marks_of_workers()
            for (a, _, size), (b, _, now) in pairwise(each)
            if size == now and b <= end
        ]
        return is_over, steps

    def step_seconds(self, count: int) -> float:
        """Wait for so many more steps at full size; the median distance of two."""
        begin, size = time.time(), self.size
        self._wait(lambda marks: sum(t > begin and s == size for t, _, s in marks) >= count * size, 600.0)
        times = sorted(t for t, _, s in self._marks() if t > begin and s == size)[::size]
        return statistics.median(b - a for a, b in pairwise(times))

    def stop(self) -> None:
        """End the job and every worker that wrote its pid; nothing else."""
        if self.process is None:
            return
        self.process.terminate()  # launchers end their workers, also those that have not signed in yet
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


def recovery(num_kills: int, num_torchrun_kills: int) -> None:
    chance = random.Random(0)
    python = [sys.executable, "-m"]
    ours = ["phalanx", "run", "--on-failure=heal", "--preload=torch._dynamo,phalanx.elastic"]
    theirs = ["torch.distributed.run", "--standalone"]
    contenders: list[Contender] = []
    with contextlib.ExitStack() as stack:
        for name, command in (("phalanx", ours), ("torchrun", theirs)):
            contenders.append(Contender(name, [*python, *command]))
            stack.callback(contenders[-1].stop)
            contenders[-1].start()
        stack.callback(show, contenders)  # also when it is cut short
        for turn in range(num_kills):
            for contender in contenders:
                if contender.name == "phalanx" or turn < num_torchrun_kills:
                    contender.strike(chance)
                    time.sleep(0.5)


def show(contenders: list[Contender]) -> None:
    print(
        f"{'SIGKILL to the next committed step':36s} {'median s':>9s} {'worst s':>9s} "
        f"{'full size: median s':>20s} recovered"
    )
    for one in contenders:
        times, full = one.to_any or [float("nan")], one.to_full or [float("nan")]
        print(
            f"{one.name:36s} {statistics.median(times):9.3f} {max(times):9.3f} {statistics.median(full):20.3f} "
            f"{len(one.to_any)} of {len(one.to_any) + one.num_lost}",
            flush=True,
        )
    ours, theirs = contenders
    for what, mine, others in (
        ("next step", ours.to_any, theirs.to_any),
        ("full size", ours.to_full, theirs.to_full),
    ):
        if mine:
            record(
                f"elastic/kill/{what}",
                "s",
                statistics.median(mine),
                statistics.median(others) if others else None,
                low=min(mine),
                high=max(mine),
                note=f"recovered {came_back(ours)}, torchrun {came_back(theirs)}",
            )


def came_back(one: Contender) -> str:
    return f"{len(one.to_any)} of {len(one.to_any) + one.num_lost}"


@dataclass
class Kills:
    """What kills at one size of state have cost."""

    steps: dict[tuple[str, int], float] = field(default_factory=dict)
    """Seconds of a step by job and number of workers, with nothing to move."""
    raw: dict[str, list[float]] = field(default_factory=lambda: {"sharded": [], "replicas": []})
    """Seconds from a kill to the next step, by job."""
    took: dict[str, list[float]] = field(default_factory=lambda: {"sharded": [], "replicas": []})
    """The same without a step of the workers that are left."""
    num_kills: dict[str, int] = field(default_factory=lambda: {"sharded": 0, "replicas": 0})
    """All, also those after which the job did not go on."""
    why_lost: list[str] = field(default_factory=list)
    """What jobs said that did not go on."""
    to_survivors: list[int] = field(default_factory=list)
    """Bytes of parameters; of kills after which all cells came where they belong, here and below."""
    to_newcomers: list[int] = field(default_factory=list)
    unprotected: list[float] = field(default_factory=list)
    """Seconds from a kill until every cell had all its copies again."""
    mean: list[float] = field(default_factory=list)
    """Time of all steps while cells moved, over that of as many steps of as many workers with nothing to move."""
    median: list[float] = field(default_factory=list)
    """The same of one step."""

    def recovered(self, job: str) -> str:
        return f"recovered {len(self.raw[job])} of {self.num_kills[job]}"

    @property
    def settled(self) -> str:
        return f"settled {len(self.unprotected)} of {self.num_kills['sharded']}"


def sharded_recovery(num_kills: int) -> None:
    """Kill workers of a sharded job and of one with whole replicas, in turn, at three sizes of state."""
    chance = random.Random(0)
    loaded = "--preload=torch._dynamo,phalanx.elastic,phalanx.fsdp"
    command = [sys.executable, "-m", "phalanx", "run", "--on-failure=heal", loaded]
    print(
        "\nSIGKILL to the next committed step, without a median step of the workers left (and as it is); bytes moved "
        "between survivors and to the newcomer, over 2/3 of them; steps from the kill until nothing moves, over steps "
        "of as many workers with nothing to move: all of them (and the median)"
    )
    for size, (width, depth) in sharded.SIZES.items():
        found = Kills()
        for name in ("sharded", "replicas"):
            fewer = Contender(name, command, [size], SIZE - 1)
            with contextlib.ExitStack() as stack:
                stack.callback(fewer.stop)
                fewer.start()
                found.steps[name, SIZE - 1] = fewer.step_seconds(2 * sharded.STEPS_BEFORE)
        pair = [Contender(name, command, [size]) for name in ("sharded", "replicas")]
        with contextlib.ExitStack() as stack:
            for one in pair:
                stack.callback(one.stop)
                one.start()
                one.pause()
            for _ in range(min(num_kills, MOST_LARGE_KILLS) if size == sharded.LARGEST else num_kills):
                for one in pair:
                    strike_once(one, chance, found, sharded.SETTLED_AFTER[size])
        tell_recovery(size, found, 4 * depth * (width * width + width))


def strike_once(one: Contender, chance: random.Random, found: Kills, limit: float) -> None:
    """Kill a worker of a job that rests, wait until it is as before, and have it rest again.

    A job whose cells are not where they belong after ``limit`` seconds is begun anew: the next loss might be its end.
    """
    one.go_on()
    found.steps[one.name, SIZE] = one.step_seconds(sharded.STEPS_BEFORE)
    moves = sharded.Moves(one.directory)
    found.num_kills[one.name] += 1
    if not one.strike(chance):
        found.why_lost.append(f"{one.name}: {one.why_lost[-1]}")
    else:
        found.raw[one.name].append(one.to_any[-1])
        found.took[one.name].append(one.to_any[-1] - found.steps[one.name, SIZE - 1])
        if one.name == "sharded" and not note_moves(one, moves, found, limit):
            one.start_anew()
    one.pause()


def note_moves(one: Contender, moves: sharded.Moves, found: Kills, limit: float) -> bool:
    """Wait until all cells are where they belong and note what that took; False if it did not come to that."""
    is_over, steps = one.settle(moves, limit)
    if not is_over:
        return False
    found.unprotected.append(moves.last() - moves.since)
    found.to_survivors.append(moves.between_survivors())
    found.to_newcomers.append(moves.to_newcomers())
    taken = [(seconds, found.steps[one.name, size]) for seconds, size in steps if size >= SIZE - 1]
    if len(taken) > 1:
        found.mean.append(sum(seconds for seconds, _ in taken) / sum(usual for _, usual in taken))
        found.median.append(statistics.median(seconds / usual for seconds, usual in taken))
    return True


def tell_recovery(size: str, found: Kills, parameters: int) -> None:
    """Print and record what kills at one size of state have cost; ``parameters`` in bytes."""
    for why in found.why_lost:
        print(f"{size:8s} did not go on after a kill: {why}")
    for job in found.raw:
        print(f"{size:8s} {job}: {found.recovered(job)}")
        record(
            f"elastic/sharded/recovered/{job}/{size}", "kills", len(found.raw[job]), found.num_kills[job],
            note="; ".join(why for why in found.why_lost if why.startswith(job)),
        )  # fmt: skip
    print(f"{size:8s} sharded: {found.settled}")
    record(f"elastic/sharded/settled/{size}", "kills", len(found.unprotected), found.num_kills["sharded"])
    tell_times(size, found)
    tell_moves(size, found, parameters)


def tell_times(size: str, found: Kills) -> None:
    if not all(found.took.values()):
        return
    note = f"{found.recovered('sharded')}; unsharded {found.recovered('replicas')}"
    for way, name, times in (("kill", "", found.took), ("kill with its step", "as it is ", found.raw)):
        ours, theirs = (statistics.median(times[job]) for job in ("sharded", "replicas"))
        print(
            f"{size:8s} {name}sharded {ours:7.3f} s  whole replicas {theirs:7.3f} s  {ours / theirs:5.2f} (goal 1.20)"
        )
        extremes = {"low": min(times["sharded"]), "high": max(times["sharded"])}
        record(f"elastic/sharded/{way}/{size}", "s", ours, theirs, **extremes, note=note)


def tell_moves(size: str, found: Kills, parameters: int) -> None:
    """Tell of the kills after which all cells came where they belong; of none, nothing can be said."""
    if not found.unprotected:
        return
    seconds, note = found.unprotected, found.settled
    print(f"{size:8s} until protected again {statistics.median(seconds):7.3f} s (worst {max(seconds):.3f}), {note}")
    name, extremes = f"elastic/sharded/unprotected/{size}", {"low": min(seconds), "high": max(seconds)}
    record(name, "s", statistics.median(seconds), None, **extremes, note=note)
    share = parameters * 2 / SIZE
    for way, amounts in (("between survivors", found.to_survivors), ("to the newcomer", found.to_newcomers)):
        print(f"{size:8s} moved {way} {max(amounts) / share:5.2f} (goal 1.05), {note}")
        record(f"elastic/sharded/moved {way}/{size}", "bytes", max(amounts), share, low=min(amounts), note=note)
    for way, slowed in (("step while cells move", found.mean), ("median step while cells move", found.median)):
        if slowed:
            print(f"{size:8s} {way} {statistics.median(slowed):5.2f} (goal 1.10), {note}", flush=True)
            name, extremes = f"elastic/sharded/{way}/{size}", {"low": min(slowed), "high": max(slowed)}
            record(name, "x", statistics.median(slowed), 1.0, **extremes, note=note)


# -- steady state -----------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):
    def __init__(self, length: int = 4096, context: int = 32) -> None:
        self.codes = torch.randint(0, 256, (length, context + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[index, :-1], self.codes[index, 1:]


class Transformer(nn.Module):
    def __init__(self, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.table(codes)))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def ddp_steps(rank: int, size: int, parts: int, batch: int) -> Iterator[None]:
    """torch's DDP, accumulating over ``parts`` micro-batches per step."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters())
    data = Tokens()
    while True:
        loader = iter(DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, size, rank), drop_last=True))
        for _ in range(len(data) // size // batch // parts):
            for part in range(parts):
                if part < parts - 1:
                    with model.no_sync():
                        (loss_of(model, *next(loader)) / parts).backward()
                else:
                    (loss_of(model, *next(loader)) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def alone_steps(parts: int, batch: int) -> Iterator[None]:
    """Forward, backward and update of as many micro-batches, and nobody to sum with."""
    from torch.utils.data import DataLoader

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loader = iter(DataLoader(Tokens(), batch_size=batch, shuffle=True, drop_last=True))
        for _ in range(len(Tokens()) // batch // parts):
            for _ in range(parts):
                (loss_of(model, *next(loader)) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def job_steps(group: object, num_slots: int, batch: int) -> Iterator[None]:
    from phalanx.elastic import Job, RunOptions

    model = Transformer()
    job = Job(
        model,
        torch.optim.AdamW(model.parameters()),
        Tokens(),
        num_slots=num_slots,
        slot_batch_size=batch,
        run=RunOptions(progress=False, group=group),  # type: ignore[arg-type]  # imported late
    )
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(loss_of(model, micro.inputs, micro.targets))
        step.commit()
        yield


def steady_worker(rank: int, size: int, url: str, port: int, rounds: int) -> None:
    from phalanx.comm import Group
    from phalanx.comm.stores import connect

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = Group.create(connect(url), rank, size)
    slots, batch = 4, 4
    cases: dict[str, Iterator[None]] = {
        "DDP, one batch of 16": ddp_steps(rank, size, 1, slots * batch),
        "DDP, 4 micro-batches of 4": ddp_steps(rank, size, slots, batch),
        "job, one slot of 16 per worker": job_steps(group, size, slots * batch),
        "job, 4 slots of 4 per worker": job_steps(group, size * slots, batch),
        "alone, one batch of 16": alone_steps(1, slots * batch),
        "alone, 4 micro-batches of 4": alone_steps(slots, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 3):
        for name, steps in cases.items():
            dist.barrier()
            start = time.perf_counter()
            next(steps)
            dist.barrier()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        numel = sum(p.numel() for p in Transformer().parameters())
        print(
            f"\nsteady state, {size} workers, {numel / 1e6:.1f}M parameters, group {group.backend}, median of {rounds}"
        )
        for name, value in medians.items():
            print(f"{name:36s} {value * 1000:9.1f} ms")
        plain, micro, one, many, alone, alone_micro = medians.values()
        record("elastic/step/one batch", "ms", one * 1e3, plain * 1e3)
        record("elastic/step/micro-batches", "ms", many * 1e3, micro * 1e3)
        record("elastic/step/one batch/alone", "ms", alone * 1e3, plain * 1e3)
        record("elastic/step/micro-batches/alone", "ms", alone_micro * 1e3, micro * 1e3)
        print(f"job over DDP, same work in one batch    {one / plain:6.3f}   (alone: {alone / plain:.3f})")
        print(f"job over DDP, same work in micro-batches {many / micro:5.3f}   (alone: {alone_micro / micro:.3f})")
        print(f"slots: 4 of 4 over one of 16            {many / one:6.3f}   (DDP's micro-batches: {micro / plain:.3f})")
    dist.barrier()
    os._exit(0)  # the generators hold groups; nothing here is worth an orderly end


def steady(rounds: int) -> None:
    import socket

    from phalanx.comm.stores import TCPStore

    context = multiprocessing.get_context("spawn")
    store = TCPStore.serve()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = store.address if "://" in store.address else f"tcp://{store.address}"
    processes = [
        context.Process(target=steady_worker, args=(rank, 2, url, port, rounds), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    store.close()


def main() -> None:
    if sys.argv[1:2] in (["sharded-worker"], ["replicas-worker"]):
        torch.set_num_threads(1)
        sign_in(Path(sys.argv[2]))
        sharded.worker(Path(sys.argv[2]), sys.argv[3], sharded=sys.argv[1] == "sharded-worker", mark=mark)
        return
    if sys.argv[1:2] in (["torchrun-worker"], ["phalanx-worker"]):
        torch.set_num_threads(1)
        worker = torch_worker if sys.argv[1] == "torchrun-worker" else phalanx_worker
        worker(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--torchrun-kills", type=int, default=20, help="fewer: a hang of its costs LIMIT seconds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sharded-rounds", type=int, default=12)
    parser.add_argument("--sharded-kills", type=int, default=6, help="at most 3 at the largest state")
    parser.add_argument("--only", choices=("sharded", "unsharded"), help="leave the rows of the other job out")
    args = parser.parse_args()
    if args.only == "sharded":
        args.kills = args.rounds = 0
    elif args.only == "unsharded":
        args.sharded_rounds = args.sharded_kills = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are stopped even then
    if args.kills:
        recovery(args.kills, args.torchrun_kills)
    if args.rounds:
        steady(args.rounds)
    if args.sharded_rounds:
        sharded.steady(args.sharded_rounds)
        sharded.show_memory()
    if args.sharded_kills:
        sharded_recovery(args.sharded_kills)


if __name__ == "__main__":
    main()
