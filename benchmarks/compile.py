"""A tensor-parallel block under torch.compile, against eager, torch's DTensor, and the same program written by hand.

Forward and backward at width 32 on a fake group of two, where no bytes move: what is timed is the work on the host, of
this thread's processor. In one run, in turns: ours and torch's, eager and compiled with Inductor, and the limit: local
tensors with an all-reduce of torch's where the block has one. A fake group leaves sums as they are, so all of them have
the same results and gradients; they are compared before anything is timed.

    python -m benchmarks.compile [--quick]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx.tensor as ours
from benchmarks._results import record
from benchmarks.dtensor import Block, R, clock, make

RANKS, REPEATS, NUMBER = 2, 60, 20
SHAPE = (2, 8, 32)
GOALS = (  # name, of which, over which, goal
    ("ours compiled, over ours eager", "ours eager", "ours compiled", "at least 2.5x"),
    ("ours compiled, over torch's compiled", "torch compiled", "ours compiled", "at least 1.5x"),
    ("ours compiled, of the limit", "ours compiled", "by hand compiled", "at most 1.3x"),
    ("ours eager, over torch's eager", "torch eager", "ours eager", "at least 5x"),
)


def total(x: Tensor) -> Tensor:
    functional = torch.ops._c10d_functional
    summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD.group_name))
    return summed


class Entered(torch.autograd.Function):
    """What every rank has and each uses a part of: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return total(grads[0])


class Summed(torch.autograd.Function):
    """What each rank has a summand of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class ByHand(nn.Module):
    """The part of ``block`` that one rank computes, on plain tensors."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.heads = block.heads // RANKS
        for name, parameter in block.named_parameters():
            local: Any = parameter.detach()
            self.register_parameter(name, nn.Parameter(local.to_local().clone()))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = Entered.apply(F.layer_norm(x, (width,), self.n1))
        qkv = F.linear(y, self.qkv)
        q, k, v = qkv.view(batch, length, self.heads, qkv.shape[-1] // self.heads).transpose(1, 2).chunk(3, -1)
        a = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        a = a.transpose(1, 2).contiguous().view(batch, length, width // RANKS)
        x = x + Summed.apply(F.linear(a, self.out))
        y = Entered.apply(F.layer_norm(x, (width,), self.n2))
        return x + Summed.apply(F.linear(F.gelu(F.linear(y, self.up)), self.down))


def step(run: Callable[[Any], Any], block: nn.Module, x: Any) -> Callable[[], Any]:
    """Forward and backward of ``run``, which is ``block`` or a compiled one."""
    seed = torch.ones_like(x).detach()

    def once() -> Any:
        block.zero_grad()
        x.grad = None
        result = run(x)
        result.backward(seed)
        return result

    return once


def variants() -> dict[str, tuple[nn.Module, Any]]:
    """A block and its input by who made it."""
    meshes = {"torch": theirs.init_device_mesh("cpu", (RANKS,)), "ours": ours.init_device_mesh("cpu", (RANKS,))}
    made: dict[str, tuple[nn.Module, Any]] = {}
    for name, lib in (("torch", theirs), ("ours", ours)):
        made[name] = Block(lib, meshes[name]), make(lib, meshes[name], SHAPE, R)
    block, x = made["ours"]
    made["by hand"] = ByHand(block), x.detach().to_local().clone().requires_grad_()  # type: ignore[arg-type]  # a Block
    return made


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.to_local()
    return found.detach()


def outcome(once: Callable[[], Any], block: nn.Module, x: Any) -> dict[str, Tensor]:
    """Local values of the result and all gradients."""
    result = once()
    grads = {name: local(parameter.grad) for name, parameter in block.named_parameters()}
    return {"result": local(result), "input": local(x.grad), **grads}


def check(found: dict[str, dict[str, Tensor]]) -> None:
    """All variants computed the same, up to rounding: of the largest value, which the sums that cancel are made of."""
    expected = found["torch eager"]
    for name, values in found.items():
        for key, value in values.items():
            off = float((value - expected[key]).abs().max() / expected[key].abs().max())
            assert off < 1e-5, f"{name}: {key} is off by {off:.1e} of its largest value"


def bench(repeats: int) -> dict[str, float]:
    runs: dict[str, Callable[[], Any]] = {}
    found = {}
    for name, (block, x) in variants().items():
        compiled = torch.compile(block, fullgraph=True, dynamic=False)
        for how, run in (("eager", block), ("compiled", compiled)):
            once = runs[f"{name} {how}"] = step(run, block, x)
            found[f"{name} {how}"] = outcome(once, block, x)
            print(f"{name} {how}: ready", flush=True)
    check(found)
    return clock(runs, repeats, NUMBER)


def report(found: dict[str, float]) -> None:
    print(f"\n{'forward + backward':24} {'microseconds':>12}")
    for name, value in found.items():
        print(f"{name:24} {value:12.1f}")
    print(f"\n{'':40} {'ratio':>8}  goal")
    for name, above, below, goal in GOALS:
        print(f"{name:40} {found[above] / found[below]:7.2f}x  {goal}")
    record("compile/eager", "us", found["ours eager"], found["torch eager"])
    record("compile/compiled", "us", found["ours compiled"], found["torch compiled"])
    record("compile/by hand", "us", found["ours compiled"], found["by hand compiled"])
    record("compile/by hand eager", "us", found["ours eager"], found["by hand eager"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat: whether it runs, not how fast")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("Inductor needs a C++ compiler: install g++, or name another with CXX", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-inductor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # what is compiled is compiled now, and nothing is left behind
        with torch._inductor.config.patch(compile_threads=1):
            report(bench(1 if options.quick else options.repeats))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
