"""Step times of our DistributedDataParallel over torch's on gloo, interleaved in the same two processes.

    python -m benchmarks.ddp [--rounds 32] [--only small,transformer,bound] [--no-memory]

Models: 2,000 small parameters; a 25M-parameter transformer; one wide layer that is mostly communication. Ours runs on
the same gloo group as torch's (ratio "gloo") and on the fastest group for one host (ratio "same host"), each with and
without an fp16 hook, each plain and with views (``gradient_as_bucket_view``). "by hand" is the least that a step on
gloo can cost whose gradients are used: the plain model, its gradients in one flat buffer, and one all-reduce of that
after backward; "wire" is less than any step can cost: the plain model, and then one all-reduce of a flat buffer that
nobody fills or reads ("wire same host": by our group for one host, after one copy into it); "alone" is the plain model
without any reduction; "torch again" is a second wrapper of torch's with the same setting: how far it is
from 1.00 says what the run cannot tell apart. A step is zero_grad, forward, backward (no optimizer). Each round runs
every variant once, plain and views alike, in an order in which each follows each other one equally often; the numbers
are medians over rounds and the worse of the two ranks. Beside the time that passed stands a step's processor time, the
mean of the ranks, which other processes disturb less. Memory is the peak resident size of a process of its own per
variant, and beside it the largest proportional size (shared pages count by share) after a step, where the system
tells it.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks._results import record
from benchmarks._turns import answers_of, orders
from phalanx.comm import Group
from phalanx.comm.stores import connect
from phalanx.ddp import DistributedDataParallel
from phalanx.ddp.hooks import default as our_hooks

WORLD = 2
GOALS = {"small": 0.80, "transformer": 0.75, "bound": 0.55}
WRAPPED = ("torch", "torch again", "gloo", "same host", "torch fp16", "gloo fp16", "same host fp16")
FLOORS = ("by hand", "wire", "wire same host", "alone")
VARIANTS = (*FLOORS, *(f"{variant} {view}" for view in ("plain", "views") for variant in WRAPPED))
WARM_UP = 5
"""Rounds that are not counted: they warm up, learn the order and tune bucket sizes."""


class Small(nn.Module):
    """2,000 parameters of 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(2000)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


class Transformer(nn.Module):
    """8 layers, width 512: 25M parameters."""

    def __init__(self, width: int = 512, num_layers: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Bound(nn.Module):
    """12M parameters in three wide layers, and hardly any work for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "small": (Small, lambda: torch.randn(4, 8)),
    "transformer": (Transformer, lambda: torch.randn(2, 32, 512)),
    "bound": (Bound, lambda: torch.randn(2, 2000)),
}


class ByHand(nn.Module):
    """Any model with the least of data parallelism: no hooks, no buckets, no copies, no overlap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        params = list(model.parameters())
        self.flat = torch.zeros(sum(param.numel() for param in params))
        for param, grad in zip(params, self.flat.split([param.numel() for param in params]), strict=True):
            param.grad = grad.view_as(param)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.flat.zero_()

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= WORLD


class Wire(nn.Module):
    """Any model, and as many bytes over the wire as it has parameters: no step that reduces gradients can take less."""

    def __init__(self, model: nn.Module, group: Group | None) -> None:
        super().__init__()
        self.model, self.group = model, group
        size = sum(param.numel() for param in model.parameters())
        self.flat = torch.zeros(size) if group is None else group.shared_empty((size,), torch.float32).zero_()
        self.source = None if group is None else torch.zeros(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def reduce(self) -> None:
        if self.group is None:
            dist.all_reduce(self.flat)
            return
        assert self.source is not None, "made with the group"
        self.flat.copy_(self.source)
        self.group.all_reduce(self.flat)


def build(variant: str, make: Callable[[], nn.Module], groups: dict[str, Group]) -> nn.Module:
    """One of ``VARIANTS``: who reduces, perhaps by a hook, and how gradients are kept."""
    torch.manual_seed(0)
    if variant == "by hand":
        return ByHand(make())
    if variant.startswith("wire"):
        return Wire(make(), groups["same host"] if variant == "wire same host" else None)
    if variant == "alone":
        return make()
    wrapped, _, kept = variant.rpartition(" ")
    base, view = wrapped.removesuffix(" fp16"), kept == "views"
    if base.startswith("torch"):
        model: Any = TorchDDP(make(), gradient_as_bucket_view=view)
        hook: Any = torch_hooks.fp16_compress_hook
    else:
        model = DistributedDataParallel(make(), process_group=groups[base], gradient_as_bucket_view=view)
        hook = our_hooks.fp16_compress_hook
    if wrapped.endswith(" fp16"):
        model.register_comm_hook(groups.get(base), hook)
    return model


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds that passed, and seconds of the processor."""
    model.zero_grad()
    start, used = time.perf_counter(), time.process_time()
    model(x).sum().backward()
    if isinstance(model, ByHand | Wire):
        model.reduce()
    return time.perf_counter() - start, time.process_time() - used


def connect_groups(rank: int, url: str, variants: Sequence[str]) -> dict[str, Group]:
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    store = dist.PrefixStore("torch", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    groups = {}
    for name, backend in (("gloo", "gloo"), ("same host", "auto")):
        if any(variant.startswith(name) for variant in variants):
            groups[name] = Group.create(connect(url), rank, WORLD, backend=backend, job=f"bench-{backend}")
    return groups


def times(rank: int, url: str, name: str, rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    groups = connect_groups(rank, url, VARIANTS)
    make, data = MODELS[name]
    models = {variant: build(variant, make, groups) for variant in VARIANTS}
    torch.manual_seed(rank)
    x = data()
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    turns = orders(VARIANTS)
    gc.collect()
    gc.freeze()  # the collector looks at what a step makes, as it would of one model alone, not at all the variants
    for round_number in range(WARM_UP + rounds):
        for variant in turns[round_number % len(turns)]:
            dist.barrier()
            seconds = step(models[variant], x)
            if round_number >= WARM_UP:
                taken[variant].append(seconds)
    backends = {key: group.backend for key, group in groups.items()}
    medians = {variant: tuple(map(statistics.median, zip(*values, strict=True))) for variant, values in taken.items()}
    pipe.send((medians, backends))


def proportional_kib() -> int:
    """This process's size with shared pages divided among those who share them; 0 where it cannot be known."""
    try:
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except OSError:
        return 0


def memory(rank: int, url: str, name: str, variant: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    groups = connect_groups(rank, url, [variant])
    before, fair_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, proportional_kib()
    fair = []
    make, data = MODELS[name]
    model = build(variant, make, groups)
    x = data()
    for _ in range(8):
        step(model, x)
        fair.append(proportional_kib())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send(({"peak": (peak - before) / 1024, "fair": (max(fair) - fair_before) / 1024}, {}))


def report_times(name: str, rounds: int) -> None:
    """Measure and record a model: ours over torch's with the same setting and hook, and views over plain."""
    answers = answers_of(times, WORLD, name, rounds)
    worst = {variant: max(answer[0][variant][0] for answer in answers) for variant in VARIANTS}
    used = {variant: statistics.mean(answer[0][variant][1] for answer in answers) for variant in VARIANTS}

    def tell(kind: str, view: str, variants: tuple[str, str], goal: float | str = "") -> None:
        """Of both times, the first of ``variants`` over the second."""
        label = variants[0].removesuffix(f" {view}")
        said = f"{name:14s} {view:16s} {label:16s}"
        for start, seconds in (("ddp", worst), ("ddp/processor", used)):
            ours, base = (seconds[variant] for variant in variants)
            said += f" {ours * 1e3:9.2f} {ours / base:10.2f}"
            if variants[0] != variants[1]:
                record(f"{start}/{kind}/{label.removesuffix(' views')}", "ms", ours * 1e3, base * 1e3)
        print(f"{said} {goal!s:>6s}", flush=True)

    for view in ("plain", "views"):
        for variant in (*FLOORS, *WRAPPED):
            whole = variant if variant in worst else f"{variant} {view}"
            base = f"torch fp16 {view}" if variant.endswith(" fp16") else f"torch {view}"
            goal = {"gloo": 0.95, "same": GOALS[name]}.get(variant.split()[0], "")
            tell(f"{name}/{view}", view, (whole, base), goal)
    for variant in WRAPPED:
        goal = "" if variant.startswith("torch") else 1.0
        tell(f"views over plain/{name}", "over plain", (f"{variant} views", f"{variant} plain"), goal)
    print(f"{'':14s} same host is the backend {answers[0][1].get('same host')!r}")


def report_memory(name: str, view: str) -> None:
    torchs = 0.0, 0.0
    for variant in ("torch", "gloo", "same host"):
        answers = answers_of(memory, WORLD, name, f"{variant} {view}")
        peak, fair = (max(answer[0][key] for answer in answers) for key in ("peak", "fair"))
        print(f"{name:14s} {view:16s} {variant:16s} {peak:9.1f} {fair:9.1f}", flush=True)
        if variant == "torch":
            torchs = peak, fair
        else:
            record(f"ddp/memory/{view}/{name}/{variant}/peak", "MiB", peak, torchs[0])
            record(f"ddp/memory/{view}/{name}/{variant}/proportional", "MiB", fair, torchs[1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2 * len(VARIANTS), help=f"best a multiple of {len(VARIANTS)}")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    columns = f"{'ms':>9s} {'over torch':>10s}"
    print(f"{'':48s} {'passed':>20s} {'of the processor':>20s}")
    print(f"{'model':14s} {'gradients':16s} {'variant':16s} {columns} {columns} {'goal':>6s}")
    for name in options.only.split(","):
        report_times(name, options.rounds)
    if not options.no_memory:
        print("\nMiB above the start: peak resident, proportional after a step")
        for name in options.only.split(","):
            for view in ("plain", "views"):
                report_memory(name, view)
    return 0


if __name__ == "__main__":
    sys.exit(main())
