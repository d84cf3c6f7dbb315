"""What programs do on a device, each as a function of its kind: on the processors, the fake accelerator, or CUDA.

Every program begins with ``use(kind)``, runs in a process of its own, and returns plain values, which have to be the
same on every kind that computes with the processors' kernels.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from processes import Worker


def use(kind: str, worker: Worker) -> torch.device:
    """Return this rank's device; ready for use."""
    if kind == "late":
        from devices import late

        late.install()
    if kind == "cuda":
        torch.cuda.set_device(worker.rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


def digest(values: Any) -> str:
    """A hash of tensors, in order; their devices do not count."""
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 5)).to(device)


def batch_on(device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(6, 12, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    return inputs.to(device), targets.to(device)


# -- collectives ----------------------------------------------------------------------------------------------------


def all_collectives(worker: Worker, kind: str) -> dict[str, Any]:
    """Every collective, on tensors that were computed just before and are read just after."""
    device = use(kind, worker)
    group = worker.group(backend="auto")
    rank, size = group.rank, group.size

    def mine(*shape: int, factor: float = 1.0) -> Tensor:
        values = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=device).reshape(shape)
        return values * factor * (rank + 1)  # a kernel that the collective has to wait for

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, -1.0, device=device)

    out: dict[str, Any] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        out[name] = [(tensor * 2).cpu().tolist() for tensor in tensors]  # a kernel that reads the result

    total = mine(4)
    group.all_reduce(total)
    keep("all_reduce", total)
    largest = mine(2, 3)
    group.all_reduce(largest, "max")
    keep("max", largest)
    works, several = [], [mine(3, factor=f) for f in (1.0, 2.0, 3.0)]
    for each in several:
        works.append(group.all_reduce(each, async_op=True))
    for work in reversed(works):
        work.wait()
    keep("async", *several)
    reduced = mine(3)
    group.reduce(reduced, 1)
    keep("reduce", reduced)
    sent = mine(5)
    group.broadcast(sent, 1)
    keep("broadcast", sent)
    parts = [empty(2) for _ in range(size)]
    group.all_gather(parts, mine(2))
    keep("all_gather", *parts)
    whole = empty(size * 2)
    group.all_gather_into_tensor(whole, mine(2))
    keep("all_gather_into_tensor", whole)
    later = empty(size * 2)
    work = group.all_gather_into_tensor(later, mine(2, factor=5.0), async_op=True)  # what is given is held by the work
    work.wait()
    keep("all_gather_async", later)
    part = empty(2)
    group.reduce_scatter_tensor(part, mine(size * 2))
    keep("reduce_scatter_tensor", part)
    part = empty(3)
    group.reduce_scatter(part, [mine(3, factor=float(r + 1)) for r in range(size)])
    keep("reduce_scatter", part)
    received = [empty(2) for _ in range(size)]
    group.all_to_all(received, [mine(2, factor=10.0**r) for r in range(size)])
    keep("all_to_all", *received)
    flat = empty(size * 2)
    group.all_to_all_single(flat, mine(size * 2))
    keep("all_to_all_single", flat)
    gathered = [empty(2) for _ in range(size)] if rank == 0 else None
    group.gather(mine(2), gathered, 0)
    keep("gather", *(gathered or ()))
    got = empty(2)
    group.scatter(got, [mine(2, factor=float(r)) for r in range(size)] if rank == 0 else None, 0)
    keep("scatter", got)
    message = mine(3) if rank == 0 else empty(3)
    if rank == 0:
        group.send(message, 1)
    elif rank == 1:
        group.recv(message, 0)
    keep("send", message)
    group.barrier()
    on_host = torch.ones(2)
    group.all_reduce(on_host)
    keep("host", on_host)
    out["device"] = "".join({tensor.device.type for tensor in (total, whole, part, got)})
    group.close()
    return out


# -- training -------------------------------------------------------------------------------------------------------


def data_parallel(worker: Worker, kind: str) -> dict[str, Any]:
    """DDP: accumulation, a parameter that is not used, more passes than it takes to measure and cut buckets anew."""
    from phalanx.ddp import DistributedDataParallel

    device = use(kind, worker)
    group = worker.group(backend="auto")
    model = model_on(device)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, device=device)))
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        with ddp.no_sync():
            inputs, targets = batch_on(device, 100 * step + 50 + group.rank)
            F.cross_entropy(ddp(inputs), targets).backward()
        inputs, targets = batch_on(device, 100 * step + group.rank)
        loss = F.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    out = {"weights": digest(model.parameters()), "losses": losses, "device": next(model.parameters()).device.type}
    group.close()
    return out


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(12, generator=torch.Generator().manual_seed(index))


def elastic(worker: Worker, kind: str, folder: str) -> dict[str, Any]:
    """A job: dropout from the slots' generators, clipping, saves; stopped in the middle and resumed from the save."""
    from phalanx.elastic import Job, RunOptions, Saves

    device = use(kind, worker)
    torch.use_deterministic_algorithms(True)
    group = worker.group(backend="auto")

    def run(until: int) -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = RunOptions(progress=False, group=group, threads=1)
        job = Job(
            model, optimizer, Rows(), num_slots=4, slot_batch_size=4, seed=7, run=options, saves=Saves(folder, every=2)
        )
        for step in job.steps(max_steps=until):
            for micro in step:
                micro.backward(model(micro.batch.to(device)).square().mean())
            step.commit()
        return job

    first = run(4)
    before = digest(first.model.parameters())
    second = run(6)
    out = {
        "before": before,
        "after": digest(second.model.parameters()),
        "step": second.step,
        "device": next(second.model.parameters()).device.type,
    }
    group.close()
    return out


def distributed_tensors(worker: Worker, kind: str) -> dict[str, Any]:
    """DTensor on a mesh of the device: shard, multiply, reduce, gather, backward."""
    from phalanx.comm import DeviceMesh
    from phalanx.tensor import Replicate, Shard, distribute_tensor

    device = use(kind, worker)
    group = worker.group(backend="auto")
    mesh = DeviceMesh.from_group(group, device.type)
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(4, 6, generator=generator), torch.randn(6, 8, generator=generator)
    a = distribute_tensor(left.to(device), mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(right.to(device), mesh, [Shard(0)]).requires_grad_()
    product = a @ b  # partial sums
    whole = product.redistribute(placements=[Replicate()])
    whole.square().sum().backward()
    out = {
        "product": digest([whole.to_local()]),
        "grads": digest([a.grad.full_tensor(), b.grad.full_tensor()]),
        "device": a.to_local().device.type,
    }
    group.close()
    return out


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "collectives": all_collectives,
    "ddp": data_parallel,
    "elastic": elastic,
    "dtensor": distributed_tensors,
}


def everything(worker: Worker, kinds: list[str], names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Run several programs one after the other in the same processes, which take longer to start than to run."""
    for kind in kinds:
        use(kind, worker)  # before the first backward: torch counts devices then
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for number, (kind, name) in enumerate(itertools.product(kinds, names)):
        where = Path(folder) / f"{kind}-{name}"
        where.mkdir(exist_ok=True)
        arguments = [str(where)] if name == "elastic" else []
        found[kind][name] = PROGRAMS[name](InGeneration(worker, number), kind, *arguments)
    return found


class InGeneration:
    """A worker whose groups are of one generation."""

    def __init__(self, worker: Worker, generation: int) -> None:
        self._worker, self._generation = worker, generation
        self.rank, self.size = worker.rank, worker.size

    def group(self, **options: Any) -> Any:
        return self._worker.group(generation=self._generation, **options)
