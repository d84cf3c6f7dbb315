"""Step times, processor times and memory of ``fully_shard`` over torch's on gloo, interleaved in the same processes.

    python -m benchmarks.fsdp [--rounds 12] [--only transformer,bound] [--ranks 2,4] [--no-memory] [--no-times]

Models: a 25M-parameter transformer (a unit for each layer), and three wide layers that are mostly communication. Ours
runs on a gloo group as torch's does (ratio "gloo") and on the fastest group for one host ("same host"); our DDP, whole
on every rank, stands beside it. A step is forward, backward, AdamW and zero_grad; each round runs every variant once,
in changing order; numbers are medians over rounds and the worst of the ranks. Processor time is that of the whole
process, its threads included. Memory is what a process of its own needs at most from the second step on, above what it
needed after a step of the same variant on a model of 20 parameters (100 MiB and more are modules, which the first
optimizer imports, the same for all variants); once as resident pages and once with shared pages counted by share.
Beside it stands what the state, two gathered units, one unit's gradient and the optimizer's temporaries take by
arithmetic, activations left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks._results import record
from benchmarks._turns import answers_of
from benchmarks.ddp import Bound, Transformer, proportional_kib
from phalanx.comm import DeviceMesh, Group
from phalanx.comm.stores import connect
from phalanx.ddp import DistributedDataParallel
from phalanx.fsdp import fully_shard

VARIANTS = ("torch", "gloo", "same host", "ddp")
GOALS = {"gloo": 1.0, "same host": 0.8}
MEMORY_GOAL = 0.7
WARM_UP = 3

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[nn.Module]], Callable[[], Tensor]]] = {
    "transformer": (Transformer, lambda m: list(m.encoder.layers), lambda: torch.randn(2, 32, 512)),  # type: ignore[arg-type, union-attr]  # a module's list of layers
    "bound": (Bound, lambda m: list(m.layers), lambda: torch.randn(2, 2000)),  # type: ignore[arg-type]  # as above
}

TINY: Any = {"tiny": (lambda: nn.Sequential(nn.Linear(4, 4)), list, lambda: torch.randn(2, 4))}


class Contender:
    """One variant's model with its optimizer, ready for steps."""

    def __init__(self, variant: str, name: str, groups: dict[str, Group]) -> None:
        make, units, data = {**MODELS, **TINY}[name]
        torch.manual_seed(0)
        model = make()
        if variant == "ddp":
            model = DistributedDataParallel(model, process_group=groups["same host"])
        else:
            if variant == "torch":
                shard, mesh = torch_fully_shard, torch_mesh("cpu", (dist.get_world_size(),))
            else:
                shard, mesh = fully_shard, DeviceMesh.from_group(groups[variant], "cpu")  # type: ignore[assignment]  # ours
            for unit in units(model):
                shard(unit, mesh=mesh)
            shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(dist.get_rank())
        self.x = data()

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def connect_groups(rank: int, size: int, url: str, variants: list[str]) -> dict[str, Group]:
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    store = dist.PrefixStore("torch", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    wanted = {"gloo": "gloo" in variants, "same host": bool({"same host", "ddp"} & set(variants))}
    backends = {"gloo": "gloo", "same host": "auto"}
    return {
        name: Group.create(connect(url), rank, size, backend=backends[name], job=f"bench-{backends[name]}")
        for name, is_wanted in wanted.items()
        if is_wanted
    }


def times(rank: int, url: str, size: int, name: str, variants: list[str], rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    groups = connect_groups(rank, size, url, variants)
    contenders = {variant: Contender(variant, name, groups) for variant in variants}
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    for number in range(rounds + WARM_UP):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            contenders[variant].step()
            spent = time.perf_counter() - began, time.process_time() - cpu
            if number >= WARM_UP:
                taken[variant].append(spent)
    medians = {v: tuple(map(statistics.median, zip(*values, strict=True))) for v, values in taken.items()}
    pipe.send(medians)


@contextmanager
def most_of(measure: Callable[[], int]) -> Iterator[list[int]]:
    """The largest value that a thread sees, looking often; in the list when the block is over."""
    found, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.003):
            found[0] = max(found[0], measure())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def resident_kib(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def memory(rank: int, url: str, size: int, name: str, variants: list[str], rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    groups = connect_groups(rank, size, url, variants)
    (variant,) = variants
    Contender(variant, "tiny", groups).step()
    gc.collect()
    before = resident_kib("VmRSS:"), proportional_kib()
    contender = Contender(variant, name, groups)
    contender.step()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here: what building the whole model took is not the question
    for _ in range(rounds):
        contender.step()
    resident = resident_kib("VmHWM:")
    dist.barrier()
    with most_of(proportional_kib) as fair:  # in steps of their own: looking takes time
        for _ in range(rounds):
            contender.step()
    dist.barrier()  # who leaves no longer shares its pages, which the others would count as theirs; nobody looks now
    pipe.send(((resident - before[0]) / 1024, (fair[0] - before[1]) / 1024))


def show_times(name: str, size: int, rounds: int) -> None:
    answers = answers_of(times, size, size, name, list(VARIANTS), rounds)
    worst = {v: [max(answer[v][which] for answer in answers) for which in (0, 1)] for v in VARIANTS}
    for variant, (seconds, cpu) in worst.items():
        base, base_cpu = worst["torch"]
        goal = GOALS.get(variant, "")
        print(
            f"{name:12s} {size:5d} {variant:10s} {seconds * 1e3:9.1f} {seconds / base:6.2f} {cpu * 1e3:9.1f} "
            f"{cpu / base_cpu:6.2f} {goal!s:>5s}",
            flush=True,
        )
        if variant != "torch":
            record(f"fsdp/{name}/{size} ranks/{variant}/step", "ms", seconds * 1e3, base * 1e3)
            record(f"fsdp/{name}/{size} ranks/{variant}/cpu", "ms", cpu * 1e3, base_cpu * 1e3)


def show_memory(name: str, size: int) -> None:
    found = {v: [max(answer[which] for answer in run_memory(v, name, size)) for which in (0, 1)] for v in VARIANTS}
    computed = computed_mib(name, size)
    print(f"{name:12s} {size:5d} {'computed':10s} {computed:9.1f}")
    for variant, (resident, fair) in found.items():
        base, base_fair = found["torch"]
        print(
            f"{name:12s} {size:5d} {variant:10s} {resident:9.1f} {resident / base:6.2f} {fair:9.1f} "
            f"{fair / base_fair:6.2f}",
            flush=True,
        )
        if variant != "torch":
            record(f"fsdp/memory/{name}/{size} ranks/{variant}/peak", "MiB", resident, base)
            record(f"fsdp/memory/{name}/{size} ranks/{variant}/proportional", "MiB", fair, base_fair)
        if variant in GOALS:
            record(f"fsdp/memory/{name}/{size} ranks/{variant}/over computed", "MiB", fair, computed)


def computed_mib(name: str, size: int) -> float:
    """What a rank must hold at its peak: 16 bytes for each of its parameters (weight, gradient, AdamW's two moments),
    4 for AdamW's temporaries; two gathered units, one for the next; a unit's gradient twice, before and after it is
    packed for the reduction."""
    make, units, _ = MODELS[name]
    with torch.device("meta"):
        model = make()
    largest = max(sum(p.numel() for p in unit.parameters()) for unit in units(model))
    return (20 * sum(p.numel() for p in model.parameters()) / size + 4 * (2 + 2) * largest) / 2**20


def run_memory(variant: str, name: str, size: int) -> list[Any]:
    return answers_of(memory, size, size, name, [variant], 5)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    heads = f"{'step ms':>9s} {'/torch':>6s} {'cpu ms':>9s} {'/torch':>6s}  goal"
    print(f"{'model':12s} {'ranks':>5s} {'variant':10s} {heads}")
    for name in options.only.split(",") if not options.no_times else ():
        for size in sizes:
            show_times(name, size, options.rounds)
    if not options.no_memory:
        print(f"\nMiB above a tiny model, from the second step on (goal {MEMORY_GOAL} on 4 ranks): resident, by share")
        for name in options.only.split(","):
            for size in sizes:
                show_memory(name, size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
