"""The sharded job: what a step and its memory cost, and how long a kill takes at three sizes of state.

Part of ``python -m benchmarks.elastic``. Steps and memory: four workers, a transformer of 25M parameters with a unit
for each layer; torch's ``fully_shard`` on gloo, the job with one and with two copies, and the job whose workers hold
everything, in turns in the same processes (memory: each in processes of its own, above what they have after two steps
of the same kind with a small model, so that modules which the first step imports do not count). Kills: three workers
under ``phalanx run``, the sharded job and the one with whole replicas in turn: the time from SIGKILL to the next
committed step, as it is and without the step itself (the median of a job of two workers, who have more waves), since a
larger model has a longer one. While one is hurt and looked at, the other rests: six workers on two cores would measure
each other.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks._results import record
from benchmarks._turns import answers_of
from benchmarks.ddp import Transformer, proportional_kib
from benchmarks.fsdp import most_of
from phalanx.comm import Group
from phalanx.comm.stores import connect
from phalanx.elastic import Job, RunOptions
from phalanx.fsdp import fully_shard

WORKERS = 4
WARM_UP = 3
VARIANTS = ("torch", "copies=1", "copies=2", "unsharded")
LARGEST = "1 GB"
SIZES = {"10 MB": (128, 40), "100 MB": (512, 25), LARGEST: (1024, 60)}
"""State of a job under AdamW with its gradients, by width and number of layers."""
STEPS_BEFORE = 6
"""Steps that are timed before a kill."""
SETTLED_AFTER = {"10 MB": 120.0, "100 MB": 120.0, LARGEST: 400.0}
"""Seconds for cells to come where they belong."""
SMALL = 64
"""The width of a model that costs nothing."""


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int, context: int) -> None:
        self.x = torch.randn(256, context, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % 256], self.x[(index + 1) % 256]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def transformer(width: int) -> Transformer:
    torch.manual_seed(0)
    return Transformer(width, 8 if width > SMALL else 2)


def torch_steps(rank: int, width: int) -> Iterator[None]:
    model, mesh = transformer(width), torch_mesh("cpu", (WORKERS,))
    for layer in model.encoder.layers:
        torch_fully_shard(layer, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Sequences(width, 32)
    number = rank
    while True:
        x, y = (torch.stack(column) for column in zip(data[number], data[number + WORKERS], strict=True))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 2 * WORKERS
        yield


def job_steps(group: Group, copies: int | None, width: int) -> Iterator[None]:
    model = transformer(width)
    if copies is not None:
        for layer in model.encoder.layers:
            fully_shard(layer)
        fully_shard(model)
    job = Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        Sequences(width, 32),
        num_slots=WORKERS,
        slot_batch_size=2,
        copies="all" if copies is None else copies,
        run=RunOptions(progress=False, group=group),
    )
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(loss_of(model, micro.inputs, micro.targets))
        step.commit()
        yield


def steps_of(variant: str, rank: int, url: str, width: int = 512) -> Iterator[None]:
    if variant == "torch":
        return torch_steps(rank, width)
    copies = {"copies=1": 1, "copies=2": 2, "unsharded": None}[variant]
    return job_steps(Group.create(connect(url), rank, WORKERS, job=f"bench-{variant}-{width}"), copies, width)


def meet(rank: int, url: str) -> None:
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    store = dist.PrefixStore("torch", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    torch.set_num_threads(1)


def times(rank: int, url: str, rounds: int, pipe: Any) -> None:
    meet(rank, url)
    ways = {variant: steps_of(variant, rank, url) for variant in VARIANTS}
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds + WARM_UP):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            next(ways[variant])
            spent = time.perf_counter() - began, time.process_time() - cpu
            if number >= WARM_UP:
                taken[variant].append(spent)
    pipe.send({v: tuple(map(statistics.median, zip(*values, strict=True))) for v, values in taken.items()})


def memory(rank: int, url: str, variant: str, pipe: Any) -> None:
    meet(rank, url)
    small = steps_of(variant, rank, url, SMALL)  # lives on, as what it has loaded does
    next(small)
    next(small)
    dist.barrier()
    before = proportional_kib()
    steps = steps_of(variant, rank, url)
    next(steps)
    next(steps)
    dist.barrier()
    with most_of(proportional_kib) as most:
        for _ in range(6):
            next(steps)
    pipe.send((most[0] - before) / 1024)


def formula_mib(copies: int) -> float:
    """Bytes that a worker should need: state and gradient, the counter of sums, gathered units, a unit's gradient."""
    model = Transformer()
    total = sum(p.numel() for p in model.parameters())
    unit = max(sum(p.numel() for p in layer.parameters()) for layer in model.encoder.layers)
    sums = 4 * (math.log2(WORKERS) + 1) / WORKERS
    return ((16 * copies / WORKERS + sums) * total + (4 * 2 + 8) * unit) / 2**20


def steady(rounds: int) -> None:
    answers = answers_of(times, WORKERS, rounds)
    worst = {v: [max(answer[v][which] for answer in answers) for which in (0, 1)] for v in VARIANTS}
    print(
        f"\nsharded job, {WORKERS} workers, 25M parameters: step and processor time, over torch's fully_shard on gloo"
    )
    for variant, (seconds, cpu) in worst.items():
        base, base_cpu = worst["torch"]
        print(f"{variant:12s} {seconds * 1e3:9.1f} ms {seconds / base:6.2f} {cpu * 1e3:9.1f} ms {cpu / base_cpu:6.2f}")
        if variant != "torch":
            record(f"elastic/sharded/step/{variant}", "ms", seconds * 1e3, base * 1e3)
            record(f"elastic/sharded/cpu/{variant}", "ms", cpu * 1e3, base_cpu * 1e3)
    two, one = worst["copies=2"][0], worst["copies=1"][0]
    print(f"copies=2 over copies=1 {two / one:6.2f} (goal 1.10)")
    record("elastic/sharded/copies 2 over 1", "ms", two * 1e3, one * 1e3)


def show_memory() -> None:
    found = {variant: max(answers_of(memory, WORKERS, variant)) for variant in VARIANTS}
    print(
        "\nMiB of a worker above its start, shared pages by share: most in six steps, over the formula, over unsharded"
    )
    for variant, most in found.items():
        if not variant.startswith("copies"):
            print(f"{variant:12s} {most:9.1f}")
            continue
        expected = formula_mib(int(variant[-1]))
        print(f"{variant:12s} {most:9.1f} {most / expected:6.2f} {most / found['unsharded']:6.2f}")
        record(f"elastic/sharded/memory/{variant}/formula", "MiB", most, expected)
        record(f"elastic/sharded/memory/{variant}/unsharded", "MiB", most, found["unsharded"])


# -- kills ------------------------------------------------------------------------------------------------------------


def deep_model(size: str) -> nn.Module:
    width, depth = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def worker(directory: Path, size: str, *, sharded: bool, mark: Any) -> None:
    """Train until the job is stopped, leaving a mark for every committed step."""
    model = deep_model(size)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    job = Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        Sequences(SIZES[size][0], 1),
        num_slots=3,
        slot_batch_size=1,
        copies=2 if sharded else "all",
        run=RunOptions(progress=False, log_dir=directory / "logs"),
    )
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(loss_of(model, micro.inputs, micro.targets))
        if step.commit():
            mark(directory, job.generation, job.world_size)
        while (directory / "pause").exists():
            job.regrouping.coordinator.report(job.step)  # it does not hang
            time.sleep(0.002)


class Moves:
    """What a job's workers have told of their cells since a moment; newcomers are those whose files came later."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "logs"
        self.known = {path.name for path in self.folder.glob("events-*")}
        self.since = time.time()

    def _told(self, kind: str, *, by_newcomers: bool = False) -> list[dict[str, Any]]:
        paths = [path for path in self.folder.glob("events-*") if not by_newcomers or path.name not in self.known]
        lines = [line for path in paths for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines if f'"{kind}"' in line and line.endswith("}")]
        return [event for event in found if float(event["time"]) > self.since]

    def last(self) -> float:
        """When cells moved for the last time."""
        return max((float(event["time"]) for event in self._told("cells_moved")), default=0.0)

    def to_newcomers(self) -> int:
        """Bytes of parameters that newcomers have received; they have nothing to give."""
        return sum(int(event["bytes"]) for event in self._told("cells_moved", by_newcomers=True))

    def between_survivors(self) -> int:
        """Bytes of parameters that went from one survivor to another; both ends of each move tell of it."""
        return sum(int(event["bytes"]) for event in self._told("cells_moved")) // 2 - self.to_newcomers()

    def are_over(self) -> bool:
        """Whether a newcomer has said, after its last cell came, what it holds: workers do when all has moved."""
        moved = [float(event["time"]) for event in self._told("cells_moved", by_newcomers=True)]
        held = [event for event in self._told("cells_held", by_newcomers=True) if event["cells"]]
        return bool(moved and held) and float(held[-1]["time"]) >= max(moved)
