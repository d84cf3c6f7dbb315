"""Programs as users of torch's DDP, its hooks, ``Join``, sampler and FSDP2 write them, with torch's imports only.

A test runs each twice on the same processes, the second time with our imports (``imports.py``), and compares what they
return: tensors, numbers and lists of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Results = list[object]


def layers() -> nn.Sequential:
    """One weight is large enough to be reduced by itself, the others are not; one module has buffers.

    No bias before it: the gradient of that is rounding alone.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 160, bias=False), nn.BatchNorm1d(160), nn.Tanh(), nn.Linear(160, 160), nn.Linear(160, 4)
    )


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(number)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def values(model: nn.Module) -> Results:
    return [value.detach().clone() for value in model.state_dict().values()]


def data_parallel() -> Results:
    found: Results = []
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.01, "broadcast_buffers": False},
    ):
        model = DistributedDataParallel(layers(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found += [step(model, optimizer, number) for number in range(4)]
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def accumulated_gradients() -> Results:
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: Results = []
    for number in range(3):
        with model.no_sync():
            model(batch(10 + number)).square().mean().backward()
        model(batch(20 + number)).square().mean().backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *values(model)]


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.stem(x))


def parameters_that_some_ranks_use() -> Results:
    model = DistributedDataParallel(Chooses(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(number), (number + dist.get_rank()) % 2).square().mean().backward()
        optimizer.step()
    return [*values(model), [parameter.grad is None for parameter in model.parameters()]]


def uneven_inputs() -> Results:
    found: Results = []
    for own_context in (True, False):
        model = DistributedDataParallel(layers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join() if own_context else Join([model], divide_by_initial_world_size=False):
            for number in range(2 + dist.get_rank()):
                step(model, optimizer, number)
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def hooks() -> Results:
    found: Results = []
    for make_state, hook in (
        (lambda: None, allreduce_hook),
        (lambda: dist.group.WORLD, fp16_compress_hook),
        (lambda: None, fp16_compress_wrapper(allreduce_hook)),
        (lambda: PostLocalSGDState(None, dist.group.WORLD, 2), post_localSGD_hook),
    ):
        model = DistributedDataParallel(layers())
        model.register_comm_hook(make_state(), hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found += [step(model, optimizer, number) for number in range(4)]
    return found


def power_sgd() -> Results:
    """One matrix, since what is drawn for a second one depends on how buckets are cut."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 12, bias=False))
    model.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [*(step(model, optimizer, number) for number in range(5)), *values(model)]


def a_hook_of_ones_own() -> Results:
    def halved(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and not as text
        state.append(bucket.buffer().numel())
        sent = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])

    sizes: list[int] = []
    model = DistributedDataParallel(layers())
    model.register_comm_hook(sizes, halved)
    losses = [step(model, torch.optim.SGD(model.parameters(), lr=0.1), number) for number in range(3)]
    return [*losses, sum(sizes)]


def a_checkpoint_of_a_wrapper() -> Results:
    model = DistributedDataParallel(layers())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "plain": model.module.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = DistributedDataParallel(nn.Sequential(*layers()))
    other.load_state_dict(saved["model"])
    plain = layers()
    plain.load_state_dict(saved["plain"])
    return [sorted(saved["model"]), *values(other), *values(plain), step(other, torch.optim.SGD(other.parameters()), 1)]


def indices(loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[list[int]]:
    for (numbers,) in loader:
        yield numbers.tolist()


def sampled() -> Results:
    """In order it is torch's order; shuffled, what all ranks have together (the order is one of our own)."""
    found: Results = []
    dataset = TensorDataset(torch.arange(22))
    for drop_last in (False, True):
        in_order = DistributedSampler(dataset, shuffle=False, drop_last=drop_last)
        found += [len(in_order), *indices(DataLoader(dataset, batch_size=4, sampler=in_order))]
        shuffled = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), True, 3, drop_last)
        loader = DataLoader(dataset, batch_size=4, sampler=shuffled)
        for epoch in range(2):
            shuffled.set_epoch(epoch)
            mine = [number for numbers in indices(loader) for number in numbers]
            everyones: list[list[int]] = [[]] * dist.get_world_size()
            dist.all_gather_object(everyones, mine)
            seen = {number for numbers in everyones for number in numbers}
            found += [len(mine), len(loader), len(seen) if drop_last else sorted(seen)]
    return found


def trained_on_samples() -> Results:
    dataset = TensorDataset(torch.randn(30, 8, generator=torch.Generator().manual_seed(5)))
    loader = DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, shuffle=False))
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return values(model)


def _fully_sharded(*names: str, **options: object) -> Results:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 17), nn.Linear(17, 4))
    shape = (2, dist.get_world_size() // 2) if len(names) == 2 else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: Results = [isinstance(model, FSDPModule)]
    for number in range(3):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        model(batch(30 + number)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        loss = model(batch(number)).square().mean()
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()]
        optimizer.step()
    return [*found, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def fully_sharded() -> Results:
    return _fully_sharded("shard")


def fully_sharded_in_replicas() -> Results:
    return _fully_sharded("replicate", "shard", reshard_after_forward=False)


def fully_sharded_in_half_precision() -> Results:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fully_sharded("shard", mp_policy=policy)


PROGRAMS: list[Callable[[], Results]] = [
    data_parallel, accumulated_gradients, parameters_that_some_ranks_use, uneven_inputs, hooks, power_sgd,
    a_hook_of_ones_own, a_checkpoint_of_a_wrapper, sampled, trained_on_samples, fully_sharded,
    fully_sharded_in_replicas, fully_sharded_in_half_precision,
]  # fmt: skip
