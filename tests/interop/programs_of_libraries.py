"""More programs of plain torch, see ``programs.py``: older libraries, and rarer ways through newer ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interop.programs import _train, _two_layers


def _own(model: nn.Module) -> list[object]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def fully_sharded_by_the_first_version() -> list[object]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found: list[object] = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(
            _two_layers(), device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
        )
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with FullyShardedDataParallel.summon_full_params(model):
            found += _own(model)
    return found


def objects() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [f"to {i}" for i in range(size)] if rank == 1 else None, src=1)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered, dst=0)
    told = [rank, "told"] if rank == 2 else [None, None]
    dist.broadcast_object_list(told, src=2)
    received: list[object] = [None] * 3
    if rank == 0:
        dist.send_object_list([1, "two", {3}], dst=1)
    elif rank == 1:
        dist.recv_object_list(received, src=0)
    return [scattered, gathered, told, received]


def collectives_with_gradients() -> list[object]:
    import torch.distributed.nn.functional as functional

    size, world = dist.get_world_size(), dist.group.WORLD  # the default is the group of when torch was imported

    def rows() -> list[torch.Tensor]:
        return [torch.empty(1, 2) for _ in range(size)]

    calls: list[Callable[[Any], Any]] = [
        lambda x: functional.all_reduce(x, group=world),
        lambda x: torch.cat(list(functional.all_gather(x, world))),
        lambda x: functional.broadcast(x, 1, world),
        lambda x: functional.reduce(x, 2, group=world) * (dist.get_rank() == 2),  # elsewhere gloo leaves what it likes
        lambda x: functional.all_to_all_single(torch.empty_like(x), x, group=world),
        lambda x: torch.cat(list(functional.all_to_all(rows(), list(x.split(1)), world))),
        lambda x: functional.reduce_scatter(torch.empty(1, 2), list(x.split(1)), group=world),
        lambda x: functional.scatter([row.contiguous() for row in x.split(1)], 0, world),
    ]
    found: list[object] = []
    for call in calls:
        x = (torch.arange(2.0 * size).reshape(size, 2) + dist.get_rank()).requires_grad_()
        result = call(x)
        (result * (dist.get_rank() + 1)).sum().backward()
        found += [result.detach(), x.grad]
    return found


def groups_of_every_kind() -> list[object]:
    rank, found = dist.get_rank(), []

    def summed(group: Any) -> torch.Tensor:
        x = torch.ones(1) * rank
        dist.all_reduce(x, group=group)
        return x

    if rank in (0, 2):  # the others are not asked
        found.append(summed(dist.new_group([0, 2], use_local_synchronization=True)))
    pair, _ = dist.new_subgroups(2)
    cross, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    described = dist.new_group([1, 0], group_desc="described")
    found += [summed(pair), summed(cross), dist.get_process_group_ranks(pair), dist.get_group_rank(cross, rank)]
    if rank < 2:
        found += [described.group_desc, dist.get_process_group_ranks(described)]
    return found


def averaged_in_levels_and_after_local_steps() -> list[object]:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = _two_layers()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data += dist.get_rank()
    averager = HierarchicalModelAverager(period_group_size_dict=OrderedDict([(1, 2), (2, 4)]))
    for _ in range(3):
        averager.average_parameters(model.parameters())
    local = DistributedDataParallel(_two_layers())
    pair, _ = dist.new_subgroups(2)
    local.register_comm_hook(PostLocalSGDState(None, pair, 2), post_localSGD_hook)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    _train(local, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(2, warmup_steps=2)))
    return [*_own(model), *_own(local)]


def pipelines_with_several_stages_a_rank() -> list[object]:
    from torch.distributed.pipelining import (
        PipelineStage,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
    )

    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    data = torch.arange(64.0).reshape(8, 8) / 64
    for schedule in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(2 * size)]
        mine, cpu = (rank, rank + size), torch.device("cpu")
        stages = [PipelineStage(layers[index], index, 2 * size, cpu) for index in mine]
        run = schedule(stages, 4, loss_fn=lambda output, target: (output - target).square().mean())
        losses: list[torch.Tensor] = []
        if rank == 0:
            run.step(data)
        elif rank == size - 1:
            run.step(target=data, losses=losses)
        else:
            run.step()
        found += [*(layers[index].weight.grad for index in mine), *(loss.detach() for loss in losses)]
    return found


class _EitherHalf(nn.Module):
    """Every other rank uses one half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.halves[dist.get_rank() % 2](x))


def torchs_ddp_in_every_way() -> list[object]:
    from torch.nn.parallel import DistributedDataParallel

    found: list[object] = []
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}):
        model = DistributedDataParallel(_EitherHalf(), find_unused_parameters=True, **options)
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found += [value.detach() for value in model.state_dict().values()]
    model = DistributedDataParallel(_two_layers(), static_graph=True)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found += _own(model)
    model = DistributedDataParallel(_two_layers())
    with model.join():
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(2, 8)).sum().backward()
    with model.no_sync():
        model(torch.ones(2, 8) * dist.get_rank()).sum().backward()
    model(torch.ones(2, 8)).sum().backward()
    return [*found, *(parameter.grad for parameter in model.parameters())]


PROGRAMS: list[Callable[[], list[object]]] = [
    fully_sharded_by_the_first_version, objects, collectives_with_gradients, groups_of_every_kind,
    averaged_in_levels_and_after_local_steps, pipelines_with_several_stages_a_rank, torchs_ddp_in_every_way,
]  # fmt: skip
