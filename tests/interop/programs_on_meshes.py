"""Programs that hand groups and meshes to torch's libraries. Each takes what makes the mesh, and returns numbers.

A test runs each with torch's mesh on gloo, and with ours, whose groups and conversions torch's libraries then get.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interop.programs import _full, _train, _two_layers


@dataclass(frozen=True)
class Kit:
    """What a program takes from the import that changed."""

    init_device_mesh: Callable[..., Any]
    DeviceMesh: Any
    DistributedDataParallel: Any
    to_torch: Callable[[Any], Any]
    """The conversion for libraries that need torch's class; nothing to do with torch's own."""

    def mesh(self, *names: str) -> Any:
        shape = (2,) * len(names) if len(names) > 1 else (dist.get_world_size(),)
        return self.init_device_mesh("cpu", shape, mesh_dim_names=names)


def calls_with_a_group(kit: Kit) -> list[object]:
    mesh = kit.mesh("dp", "tp")
    found: list[object] = []
    for group in (mesh.get_group("dp"), mesh["tp"].get_group(), *mesh.get_all_groups(), kit.mesh("all").get_group()):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        x = torch.full((size,), float(dist.get_rank()))
        dist.all_reduce(x, group=group)
        work = dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
        work.wait()
        dist.broadcast(x, group=group, group_src=1)
        parts = [torch.empty(size) for _ in range(size)]
        dist.all_gather(parts, x + rank, group=group)
        part = torch.empty(1)
        dist.reduce_scatter_single(part, x, group=group)
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, x + rank, group=group)
        gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
        dist.gather(part, gathered, group=group, group_dst=0)
        reduced = x.clone()
        dist.reduce(reduced, group=group, group_dst=0)
        values: list[object] = [None] * size
        dist.all_gather_object(values, {"rank": dist.get_rank()}, group=group)
        dist.barrier(group=group)
        found += [x, *parts, part, swapped, *(gathered or []), reduced if rank == 0 else 0, values]
        found += [rank, size, group.rank(), group.size(), dist.get_process_group_ranks(group)]
        found += [dist.get_group_rank(group, dist.get_rank()), dist.get_global_rank(group, 1)]
    return found


def sends_and_receives(kit: Kit) -> list[object]:
    group = kit.mesh("dp", "tp").get_group("tp")
    mine, theirs = torch.full((3,), float(dist.get_rank())), torch.empty(3)
    peer = 1 - dist.get_rank(group)
    operations = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    again = torch.empty(3)
    if dist.get_rank(group) == 0:
        dist.send(theirs, group=group, group_dst=1)
        dist.recv(again, group=group, group_src=1)
    else:
        dist.recv(again, group=group, group_src=0)
        dist.send(theirs, group=group, group_dst=0)
    return [theirs, again]


def functional_collectives(kit: Kit) -> list[object]:
    import torch.distributed._functional_collectives as functional

    mesh = kit.mesh("dp", "tp")
    group, x = mesh.get_group("tp"), torch.arange(4.0) + dist.get_rank()
    found = []
    for where in (group, group.group_name, mesh["tp"], (mesh, 1)):
        found += [
            functional.all_reduce(x, "sum", where).clone(),
            functional.all_gather_tensor(x, 0, where).clone(),
            functional.reduce_scatter_tensor(x, "avg", 0, where).clone(),
            functional.broadcast(x, 1, where).clone(),
        ]
    return found


def flattened_axes(kit: Kit) -> list[object]:
    mesh = kit.mesh("dp", "tp")
    mesh[("dp", "tp")]._flatten("flattened")
    x = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(x, group=mesh.get_group("flattened"))
    return [x, dist.get_process_group_ranks(mesh.get_group("flattened"))]


def torchs_ddp(kit: Kit) -> list[object]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    group = kit.mesh("dp", "tp").get_group("dp")
    found = []
    for views in (False, True):
        model = DistributedDataParallel(_two_layers(), process_group=group, gradient_as_bucket_view=views)
        _train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        found += [parameter.detach() for parameter in model.parameters()]
    model = DistributedDataParallel(_two_layers(), process_group=group)
    model.register_comm_hook(PowerSGDState(group, start_powerSGD_iter=2, random_seed=1), powerSGD_hook)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*found, *(parameter.detach() for parameter in model.parameters())]


def zero_redundancy_optimizer(kit: Kit) -> list[object]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = kit.mesh("dp", "tp")
    model = kit.DistributedDataParallel(_two_layers(), device_mesh=mesh["dp"])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, process_group=model.process_group)
    _train(model, optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def join_of_several(kit: Kit) -> list[object]:
    """Torch's Join around a DDP module of the kit and an optimizer of torch's on its process group."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = kit.DistributedDataParallel(nn.Linear(3, 2), process_group=kit.mesh("dp", "tp").get_group("dp"))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, process_group=model.join_process_group
    )
    with Join([model, optimizer]):
        for index in range(3 + dist.get_rank()):
            model(torch.ones(2, 3) * index).sum().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def fully_sharded(kit: Kit) -> list[object]:
    from torch.distributed.fsdp import fully_shard

    found = []
    for mesh in (kit.mesh("dp"), kit.mesh("replicate", "shard"), kit.to_torch(kit.mesh("dp"))):
        model = _two_layers()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        _train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        found += _full(model)
    return found


def tensor_parallel_and_fully_sharded(kit: Kit) -> list[object]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = kit.mesh("dp", "tp")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, kit.to_torch(mesh["tp"]), plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)  # ranks of one tp group see the same data
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _full(model)


def checkpoint(kit: Kit) -> list[object]:
    import torch.distributed.checkpoint as dcp

    group = kit.mesh("all").get_group()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)
    state = {"weight": torch.arange(4.0), f"own/{dist.get_rank()}": torch.full((2,), float(dist.get_rank()))}
    try:
        dcp.save(state, checkpoint_id=folder[0], process_group=group)
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(loaded, checkpoint_id=folder[0], process_group=group)
        dist.barrier(group=group)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    return list(loaded.values())


def pipeline(kit: Kit) -> list[object]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    group = kit.mesh("dp", "pp").get_group("pp")
    rank, layers = dist.get_rank(group), [nn.Linear(8, 8) for _ in range(2)]
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"), group=group)
    run = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    data, losses = torch.arange(64.0).reshape(8, 8) / 64, []
    if rank == 0:
        run.step(data)
    else:
        run.step(target=data, losses=losses)
    return [layers[rank].weight.grad, *(loss.detach() for loss in losses)]


def averaged_models(kit: Kit) -> list[object]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.nn.functional import all_reduce

    group = kit.mesh("dp", "tp").get_group("dp")
    parameters = [nn.Parameter(torch.full((2,), float(dist.get_rank())))]
    parameters[0].grad = torch.zeros(2)  # those without one are left alone
    PeriodicModelAverager(period=1, process_group=group).average_parameters(parameters)
    x = torch.ones(2, requires_grad=True)
    (all_reduce(x * dist.get_rank(), group=group) * 2).sum().backward()
    return [parameters[0].detach(), x.grad]


def meshes_are_values(kit: Kit) -> list[object]:
    world = dist.group.WORLD
    mesh, given = kit.init_device_mesh("cpu", (4,)), kit.DeviceMesh.from_group(world, "cpu")
    square = kit.mesh("dp", "tp")
    again = kit.DeviceMesh.from_group(square.get_all_groups(), "cpu", square.mesh, mesh_dim_names=("dp", "tp"))
    return [given == mesh, hash(given) == hash(mesh), again == square, hash(again) == hash(square), mesh == square]


PROGRAMS: list[Callable[[Kit], list[object]]] = [
    calls_with_a_group, sends_and_receives, functional_collectives, flattened_axes, torchs_ddp,
    zero_redundancy_optimizer, join_of_several, fully_sharded, tensor_parallel_and_fully_sharded, checkpoint,
    pipeline, averaged_models, meshes_are_values,
]  # fmt: skip
