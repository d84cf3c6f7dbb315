"""Overhead of DTensor operations against torch's own DTensor, in one run, interleaved, on a fake process group.

No bytes move, so only the work on the host counts. Both libraries get the same local data and the same calls. Before a
case is timed, its results and gradients are compared on a mesh of one rank, where a fake group cannot lie, and the
layouts of its results on the mesh that is timed. Prints microseconds (least of the repeats) and torch's time over ours.

One thing is not the same: torch leaves the gradients of replicas partial where the work was sharded (in the operations
alone, not in the block); ours are summed, and the time of that is counted.

    python -m benchmarks.dtensor [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx.tensor as ours
from benchmarks._results import record

REPEATS, NUMBER = 25, 20
SIDES: dict[str, ModuleType] = {"torch": theirs, "phalanx": ours}

S0, S1, S2, R = ("S", 0), ("S", 1), ("S", 2), ("R",)


def placement(lib: ModuleType, code: tuple[Any, ...]) -> Any:
    return lib.Replicate() if code[0] == "R" else lib.Shard(code[1])


def make(lib: ModuleType, mesh: Any, shape: tuple[int, ...], code: tuple[Any, ...], **kw: Any) -> Any:
    """A DTensor leaf whose local part is the same in both libraries."""
    local_shape = list(shape)
    if code[0] == "S":
        local_shape[code[1]] //= kw.get("ranks", 2)
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    if kw.get("integers"):
        local = torch.randint(0, kw["integers"], local_shape, generator=generator)
        return lib.DTensor.from_local(
            local, mesh, [placement(lib, code)], run_check=False, shape=shape, stride=strides(shape)
        )
    local = torch.randn(local_shape, generator=generator)
    made = lib.DTensor.from_local(
        local, mesh, [placement(lib, code)], run_check=False, shape=shape, stride=strides(shape)
    )
    return made.detach().requires_grad_(kw.get("grad", True))


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "add": (lambda a, b: a + b, [((8, 16), S0), ((8, 16), S0)]),
    "mul": (lambda a, b: a * b, [((8, 16), S0), ((8, 16), S0)]),
    "matmul": (lambda a, b: a @ b, [((8, 16), S0), ((16, 8), R)]),
    "linear 2-d": (F.linear, [((8, 16), R), ((32, 16), S0), ((32,), S0)]),
    "linear 3-d": (F.linear, [((4, 8, 16), R), ((32, 16), S0), ((32,), S0)]),
    "relu": (torch.relu, [((8, 16), S0)]),
    "gelu": (F.gelu, [((8, 16), S0)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), [((8, 16), S0), ((16,), R), ((16,), R)]),
    "softmax": (lambda x: F.softmax(x, -1), [((8, 16), S0)]),
    "view": (lambda x: x.view(4, 2, 16), [((8, 16), S0)]),
    "transpose": (lambda x: x.transpose(0, 1), [((8, 16), S0)]),
    "embedding": (lambda w, i: F.embedding(i, w), [((32, 16), S1), ((4, 8), R, 32)]),
    "sum": (lambda x: x.sum(-1), [((8, 16), S0)]),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), [((8, 16), S0), ((8,), S0, 16)]),
}


def inputs(lib: ModuleType, mesh: Any, shapes: list[tuple[Any, ...]], ranks: int = 2) -> list[Any]:
    return [make(lib, mesh, s[0], s[1], integers=s[2] if len(s) > 2 else 0, ranks=ranks) for s in shapes]


def clock(runs: dict[str, Callable[[], Any]], repeats: int, number: int = NUMBER) -> dict[str, float]:
    """Microseconds of this thread's processor time of each, taken in turns, who is first changing; the least of the
    repeats, as others may run.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(5):
            run()
    for turn in range(repeats):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            run = runs[name]
            start = time.thread_time()
            for _ in range(number):
                run()
            times[name].append((time.thread_time() - start) / number * 1e6)
    return {name: min(values) for name, values in times.items()}


def forward_backward(func: Callable[..., Any], tensors: list[Any], seed: Any) -> Callable[[], Any]:
    leaves = [t for t in tensors if t.requires_grad]

    def run() -> Any:
        for leaf in leaves:
            leaf.grad = None
        func(*tensors).backward(seed)

    return run


def check_equal(name: str, func: Callable[..., Any], shapes: list[tuple[Any, ...]]) -> None:
    """Forward and gradients agree on a mesh of one rank."""
    results, leaves = {}, {}
    for side, lib in SIDES.items():
        tensors = inputs(lib, lib.DeviceMesh("cpu", [0]), shapes, ranks=1)
        results[side] = func(*tensors)
        results[side].backward(torch.ones_like(results[side]))
        leaves[side] = [t for t in tensors if t.requires_grad]
    check_alike(name, results, leaves)


def check_alike(name: str, results: dict[str, Any], leaves: dict[str, list[Any]]) -> None:
    """Results and the gradients of ``leaves`` have the same local values on both sides."""
    theirs, ours = ([results[side], *(leaf.grad for leaf in leaves[side])] for side in SIDES)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        what = f"gradient {i - 1} differs" if i else "forward differs"
        torch.testing.assert_close(x.to_local(), y.to_local(), msg=lambda text, w=what: f"{name}: {w}: {text}")


def check_layouts(name: str, results: dict[str, Any]) -> None:
    """The results of both sides are laid out alike: neither has done less."""
    theirs, ours = ([_code(p) for p in results[side].placements] for side in SIDES)
    assert ours == theirs, f"{name}: the result is laid out as {ours} here and as {theirs} by torch"
    shapes = [tuple(results[side].to_local().shape) for side in SIDES]
    assert shapes[0] == shapes[1], f"{name}: local shapes of torch and here are {shapes}"


def _code(p: Any) -> tuple[Any, ...]:
    return ("S", p.dim) if p.is_shard() else ("P", p.reduce_op) if p.is_partial() else R


def bench_ops(meshes: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {"forward": [], "forward+backward": []}
    print(f"{'operation':16} {'forward':>30} {'forward+backward':>36}")
    for name, (func, shapes) in CASES.items():
        check_equal(name, func, shapes)
        tensors = {side: inputs(lib, meshes[side], shapes) for side, lib in SIDES.items()}
        results = {side: func(*t) for side, t in tensors.items()}
        check_layouts(name, results)
        seeds = {side: torch.ones_like(result).detach() for side, result in results.items()}
        with torch.no_grad():
            fwd = clock({side: partial(func, *t) for side, t in tensors.items()}, repeats)
        both = clock({side: forward_backward(func, t, seeds[side]) for side, t in tensors.items()}, repeats)
        for kind, found in (("forward", fwd), ("forward+backward", both)):
            ratios[kind].append(found["torch"] / found["phalanx"])
            keep(f"{kind}/{name}", found)
        print(f"{name:16} {row(fwd)} {row(both)}", flush=True)
    return ratios


def keep(case: str, found: dict[str, float]) -> None:
    record(f"dtensor/{case}", "us", found["phalanx"], found["torch"])


def row(found: dict[str, float]) -> str:
    return f"{found['torch']:10.1f} {found['phalanx']:10.1f} us {found['torch'] / found['phalanx']:6.2f}x"


class Block(nn.Module):
    """A tensor-parallel transformer block, written with plain modules and functions."""

    def __init__(self, lib: ModuleType, mesh: Any, width: int = 32, heads: int = 4, ranks: int = 2) -> None:
        super().__init__()
        self.heads = heads
        torch.manual_seed(0)
        names = {
            "qkv": (3 * width, width, 0),
            "out": (width, width, 1),
            "up": (4 * width, width, 0),
            "down": (width, 4 * width, 1),
        }
        for key, (rows, columns, dim) in names.items():
            weight = make(lib, mesh, (rows, columns), ("S", dim), ranks=ranks)
            self.register_parameter(key, nn.Parameter(weight))
        for key in ("n1", "n2"):
            self.register_parameter(key, nn.Parameter(make(lib, mesh, (width,), R)))
        self.whole = [placement(lib, R)]

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        y = F.layer_norm(x, (width,), self.n1)
        qkv = F.linear(y, self.qkv).view(batch, length, self.heads, 3 * width // self.heads).transpose(1, 2)
        q, k, v = qkv.chunk(3, -1)
        a = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        a = a.transpose(1, 2).contiguous().view(batch, length, width)
        x = x + F.linear(a, self.out).redistribute(placements=self.whole)
        y = F.layer_norm(x, (width,), self.n2)
        return x + F.linear(F.gelu(F.linear(y, self.up)), self.down).redistribute(placements=self.whole)


def check_block() -> None:
    results, leaves = {}, {}
    for side, lib in SIDES.items():
        mesh = lib.DeviceMesh("cpu", [0])
        block, x = Block(lib, mesh, ranks=1), make(lib, mesh, (2, 8, 32), R)
        results[side] = block(x)
        results[side].backward(torch.ones_like(x).detach())
        leaves[side] = [x, *block.parameters()]
    check_alike("block", results, leaves)


def bench_block(meshes: dict[str, Any], repeats: int) -> float:
    check_block()
    runs, results = {}, {}
    for side, lib in SIDES.items():
        block = Block(lib, meshes[side])
        x = make(lib, meshes[side], (2, 8, 32), R)
        seed = torch.ones_like(x).detach()
        results[side] = block(x)

        def run(block: Any = block, x: Any = x, seed: Any = seed) -> None:
            block.zero_grad()
            x.grad = None
            block(x).backward(seed)

        runs[side] = run
    check_layouts("block", results)
    found = clock(runs, 3 * repeats, number=6)
    print(f"{'block fwd+bwd':16} {row(found)}", flush=True)
    keep("block", found)
    return found["torch"] / found["phalanx"]


def bench_optimizers(meshes: dict[str, Any], repeats: int) -> dict[str, float]:
    ratios = {}
    for variant, options in {
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
        "fused": {"fused": True},
    }.items():
        runs, stepped = {}, {}
        for side, lib in SIDES.items():
            parameters = [nn.Parameter(make(lib, meshes[side], (16, 16), S0)) for _ in range(10)]
            for p in parameters:
                p.grad = torch.ones_like(p).detach()
            runs[side] = torch.optim.AdamW(parameters, lr=0.01, **options).step
            runs[side]()
            stepped[side] = parameters
        for x, y in zip(stepped["phalanx"], stepped["torch"], strict=True):
            torch.testing.assert_close(x.to_local(), y.to_local())
        found = clock(runs, repeats, number=8)
        ratios[variant] = found["torch"] / found["phalanx"]
        print(f"{'AdamW ' + variant:16} {row(found)}", flush=True)
        keep(f"AdamW/{variant}", found)
    return ratios


def redistribute(after: tuple[Any, ...], x: Any) -> Any:
    lib = ours if isinstance(x, ours.DTensor) else theirs
    return x.redistribute(placements=[placement(lib, after)])


def bench_redistribute(meshes: dict[str, Any], repeats: int) -> list[float]:
    ratios = []
    for name, before, after in (("S(0)->R", S0, R), ("S(0)->S(1)", S0, S1), ("R->S(0)", R, S0)):
        check_equal(name, partial(redistribute, after), [((8, 16), before)])
        runs = {}
        for side, lib in SIDES.items():
            x = make(lib, meshes[side], (8, 16), before)
            runs[side] = partial(x.redistribute, placements=[placement(lib, after)])
        check_layouts(name, {side: run() for side, run in runs.items()})
        found = clock(runs, repeats)
        ratios.append(found["torch"] / found["phalanx"])
        print(f"{name:16} {row(found)}", flush=True)
        keep(f"redistribute/{name}", found)
    return ratios


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat: whether it runs, not how fast")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    meshes = {"torch": theirs.init_device_mesh("cpu", (2,)), "phalanx": ours.init_device_mesh("cpu", (2,))}
    ratios = bench_ops(meshes, repeats)
    moves = bench_redistribute(meshes, repeats)
    block = bench_block(meshes, repeats)
    steps = bench_optimizers(meshes, repeats)
    print("\ntorch's time over ours (geometric means)           goal")
    for name, value, goal in (
        ("forward", mean(ratios["forward"]), 2.8),
        ("forward+backward", mean(ratios["forward+backward"]), 3.5),
        ("redistribute", mean(moves), 8.0),
        ("transformer block", block, 5.0),
        ("AdamW foreach", steps["foreach"], 1.0),
        ("AdamW for-loop", steps["for-loop"], 2.5),
        ("AdamW fused", steps["fused"], 1.0),
    ):
        print(f"{name:24} {value:8.2f}x {goal:20.1f}x")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
