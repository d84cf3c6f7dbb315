"""One process of ``test_gloo.py``: the same programs with torch's DTensor and with ours, over gloo.

python gloo_worker.py RANK SIZE FILE
"""

from __future__ import annotations

import itertools
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_parallel
import torch.nn.functional as F
from torch import nn

import phalanx.tensor as ours
import phalanx.tensor.parallel as our_parallel

LIBRARIES = (ours, theirs)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def both(program: Any) -> None:
    """Run ``program`` with each library and compare what it returns."""
    results = [program(lib) for lib in LIBRARIES]
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def layouts(lib: ModuleType, axes: int) -> list[tuple[Any, ...]]:
    return list(itertools.product([lib.Replicate(), lib.Shard(0), lib.Shard(1)], repeat=axes))


def redistributions(shape: tuple[int, ...]) -> None:
    whole = torch.arange(42.0).view(6, 7)

    def program(lib: ModuleType) -> list[torch.Tensor]:
        mesh = lib.init_device_mesh("cpu", shape)
        found = []
        pairs = itertools.product(layouts(lib, len(shape)), repeat=2)
        for before, after in itertools.islice(pairs, 0, None, 5 if len(shape) > 1 else 1):
            x = lib.distribute_tensor(whole, mesh, before).requires_grad_()
            y = x.redistribute(placements=after)
            found.append(y.to_local().detach())
            (y * y).sum().backward()
            found += [x.to_local().detach(), full(x.grad)]
        return found

    both(program)


def operations(size: int) -> None:
    def program(lib: ModuleType) -> list[torch.Tensor]:
        torch.manual_seed(0)
        mesh = lib.init_device_mesh("cpu", (size,))
        x, w = torch.randn(8, 6), torch.randn(6, 4)
        found = []
        for px, pw in itertools.product(layouts(lib, 1), repeat=2):
            a = lib.distribute_tensor(x, mesh, px).requires_grad_()
            b = lib.distribute_tensor(w, mesh, pw).requires_grad_()
            out = F.gelu(a @ b).softmax(-1)
            (out * out).sum().backward()
            found += [full(out).detach(), full(a.grad), full(b.grad)]
        return found

    both(program)


def tensor_parallel(size: int) -> None:
    def program(lib: ModuleType) -> list[torch.Tensor]:
        parallel = our_parallel if lib is ours else their_parallel
        torch.manual_seed(1)
        mesh = lib.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        parallel.parallelize_module(net, mesh, plan)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
        x = torch.randn(4, 8)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found + [full(p).detach() for p in net.parameters()]

    both(program)


def names(size: int) -> None:
    """Layouts print and compare alike, and local shapes agree for uneven and empty shards."""

    def program(lib: ModuleType) -> list[torch.Tensor]:
        mesh = lib.init_device_mesh("cpu", (size,))
        return [
            torch.tensor(lib.distribute_tensor(torch.ones(n, 3), mesh, [lib.Shard(0)]).to_local().shape)
            for n in range(1, 2 * size + 2)
        ]

    both(program)


def main() -> int:
    rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    redistributions((size,))
    if size == 4:
        redistributions((2, 2))
    operations(size)
    tensor_parallel(size)
    names(size)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
