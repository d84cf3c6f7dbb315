"""Programs of plain torch, one per library of torch that stands on process groups. Each returns numbers to compare.

They know nothing of Phalanx: a test runs each on gloo and on the backend ``phalanx`` and compares what ranks return.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


def _two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batches: int = 1) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for index in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(index == micro_batches - 1)
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def device_mesh() -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(rows, group=mesh.get_group("dp"))
    columns = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(columns, group=mesh["tp"].get_group())
    both = torch.ones(1)
    dist.all_reduce(both, group=mesh["dp", "tp"]._flatten().get_group())
    return [rows, columns, both]


def dtensor() -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    product = (x @ x.t()).redistribute(mesh, [Replicate()]).to_local()
    return [product, x.redistribute(mesh, [Shard(1)]).to_local(), x.sum().full_tensor()]


def fully_sharded() -> list[object]:
    from torch.distributed.fsdp import fully_shard

    model = _two_layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return _full(model)


def fully_sharded_in_half_precision_with_accumulation() -> list[object]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _two_layers()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    return _full(model)


def hybrid_sharded() -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return _full(model)


def tensor_parallel_and_fully_sharded() -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)  # ranks of one tp group see the same data
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _full(model)


def functional_collectives() -> list[object]:
    import torch.distributed._functional_collectives as functional

    world, x = dist.group.WORLD, torch.full((4,), float(dist.get_rank()))
    return [
        functional.all_reduce(x, "sum", world).clone(),
        functional.all_gather_tensor(x, 0, world).clone(),
        functional.reduce_scatter_tensor(torch.arange(8.0), "sum", 0, world).clone(),
        functional.all_to_all_single(torch.arange(8.0), None, None, world).clone(),
        functional.broadcast(x, 1, world).clone(),
        functional.all_reduce_coalesced([x, x + 1], "avg", world)[1].clone(),
    ]


def checkpoint() -> list[object]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    model = _two_layers()
    fully_shard(model)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder[0]}/now")
        dcp.async_save(get_model_state_dict(model), checkpoint_id=f"{folder[0]}/later").result()
        loaded = []
        for name in ("now", "later"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=f"{folder[0]}/{name}")
            set_model_state_dict(model, state)
            loaded += _full(model)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    mine = {name: value * 2 for name, value in whole.items()} if dist.get_rank() == 0 else {}
    from_one = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, mine, options=from_one)
    return [*loaded, *_full(model)]


def _pipeline(schedule: type) -> list[object]:
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    run = schedule(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    data, losses = torch.arange(64.0).reshape(8, 8) / 64, []
    if rank == 0:
        run.step(data)
    elif rank == size - 1:
        run.step(target=data, losses=losses)
    else:
        run.step()
    return [layers[rank].weight.grad, *[loss.detach() for loss in losses]]


def pipeline_gpipe() -> list[object]:
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipeline(ScheduleGPipe)


def pipeline_1f1b() -> list[object]:
    from torch.distributed.pipelining import Schedule1F1B

    return _pipeline(Schedule1F1B)


def join_with_uneven_inputs() -> list[object]:
    from torch.distributed.algorithms.join import Join

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    with Join([model]):
        for index in range(3 + dist.get_rank()):
            model(torch.ones(2, 3) * index).sum().backward()
    return [model.module.weight.grad]


def zero_redundancy_optimizer() -> list[object]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_two_layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    _train(model, optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def subgroups_come_and_go() -> list[object]:
    found = []
    for ranks in ([0, 1], [1, 2, 3], [0, 1, 2, 3]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            x = torch.full((2,), float(dist.get_rank()))
            dist.all_reduce(x, group=group)
            found += [x, dist.get_process_group_ranks(group)]
            dist.destroy_process_group(group)
    return found


def sparse_all_reduce() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.sparse_coo_tensor([[rank, rank + 1]], torch.ones(2), (size + 1,))
    dist.all_reduce(one)
    two = torch.sparse_coo_tensor([[rank % 2, 1], [0, rank]], torch.ones(2, 3) * rank, (2, size, 3))
    dist.all_reduce(two)
    return [one.to_dense(), two.to_dense()]


def coalesced() -> list[object]:
    x, y = torch.ones(3), torch.full((3,), float(dist.get_rank()))
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    twice = torch.ones(3)
    with dist._coalescing_manager():
        dist.all_reduce(twice)
        dist.all_reduce(twice)
    gathered = [torch.empty(3 * dist.get_world_size()) for _ in range(2)]
    with dist._coalescing_manager():
        for output in gathered:
            dist.all_gather_into_tensor(output, y)
    return [x, y, twice, *gathered]


def _values(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_values(item) for item in value]


def what_works_hold() -> list[object]:
    """The futures and results of all kinds of works: as many tensors, of these shapes, with these values."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def own() -> torch.Tensor:
        return torch.full((2,), float(rank))

    def parts(first: float = 0.0) -> list[torch.Tensor]:
        return [torch.full((2,), first + other) for other in range(size)]

    works = {
        "all_reduce": dist.all_reduce(own(), async_op=True),
        "broadcast": dist.broadcast(own(), 1, async_op=True),
        "reduce": dist.reduce(own(), 0, async_op=True),
        "all_gather": dist.all_gather(parts(), own(), async_op=True),
        "all_gather_into_tensor": dist.all_gather_into_tensor(torch.empty(2 * size), own(), async_op=True),
        "all_to_all": dist.all_to_all(parts(), parts(10.0 * rank), async_op=True),
        "all_to_all_single": dist.all_to_all_single(
            torch.empty(2 * size), torch.arange(2.0 * size) + 10 * rank, async_op=True
        ),
        "gather": dist.gather(own(), parts() if rank == 0 else None, 0, async_op=True),
        "scatter": dist.scatter(own(), parts(10.0) if rank == 0 else None, 0, async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    found: list[object] = []
    for name, work in works.items():
        work.wait()
        in_between = name == "reduce" and rank > 0  # what other ranks than the root hold is nobody's business
        for held in (work.get_future().wait(), work.result()):
            found.append([name, len(held), None if in_between else _values(held)])
    return found


def calls_of_the_group_itself() -> list[object]:
    from datetime import timedelta

    world, size = dist.group.WORLD, dist.get_world_size()
    x = torch.full((2,), float(dist.get_rank()))
    world.allreduce(x).wait()
    world.allreduce([x], dist.ReduceOp.MAX).wait()
    world.broadcast(x, 1).wait()
    reduced = x.clone()
    world.reduce(reduced, 0).wait()
    parts = [torch.empty(2) for _ in range(size)]
    world.allgather(parts, x).wait()
    world.barrier(timeout=timedelta(seconds=30)).wait()
    return [
        x,
        reduced if world.rank() == 0 else 0,
        *parts,
        world.size(),
        world.rank(),
        world.group_name,
        world.group_desc,
    ]


def recv_from_any_source() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[object] = []
    for count in (3, 100_000):  # small ones, and larger than what is sent at once
        x = torch.full((count,), float(rank))
        if rank == 0:
            outputs = [torch.empty(count) for _ in range(1, size)]
            sources = [dist.recv(output) for output in outputs]
            found += [sorted(zip(sources, (output.mean().item() for output in outputs), strict=True))]
        else:
            dist.send(x, 0)
        dist.barrier()
    if rank == 0:
        x, y = torch.empty(2), torch.empty(2)
        found += [dist.recv(x, tag=7), x, dist.recv(y, src=1, tag=5), y]  # that with tag 5 was sent first
    elif rank == 1:
        work = dist.isend(torch.full((2,), 5.0), 0, tag=5)
        dist.send(torch.full((2,), 7.0), 0, tag=7)
        work.wait()
    dist.barrier()
    if rank < 2:
        received = torch.empty(300_000)
        work = dist.irecv(received)  # both send before they wait
        dist.send(torch.full((300_000,), float(rank)), 1 - rank)
        work.wait()
        found += [work._source_rank(), received]
    return found


def sequence_numbers() -> list[object]:
    world = dist.group.WORLD
    found = []
    x = torch.ones(2)
    for call in (lambda: dist.all_reduce(x), dist.barrier, lambda: dist.broadcast(x, 0)):
        before = world._get_sequence_number_for_group()
        call()
        found.append(world._get_sequence_number_for_group() - before)
    return found


def a_call_with_a_timeout() -> list[object]:
    """Rank 1 comes too late to a call that may take a tenth of a second; the default would wait for it."""
    from datetime import timedelta

    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.1)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.0)
        return ["late"]
    try:
        dist.group.WORLD.allreduce([torch.ones(2)], options).wait()
    except RuntimeError:
        return ["timed out"]
    return ["waited"]


def monitored_barrier() -> list[object]:
    from datetime import timedelta

    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    dist.group.WORLD.monitored_barrier(timeout=timedelta(seconds=30))
    if dist.get_rank() == 2:
        time.sleep(2.0)
        return ["late"]
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        return ["error", dist.get_rank() > 0 or "anks 2" in str(error) or "anks [2]" in str(error)]
    return ["passed"]


PROGRAMS: list[Callable[[], list[object]]] = [
    device_mesh, dtensor, fully_sharded, fully_sharded_in_half_precision_with_accumulation, hybrid_sharded,
    tensor_parallel_and_fully_sharded, functional_collectives, checkpoint, pipeline_gpipe, pipeline_1f1b,
    join_with_uneven_inputs, zero_redundancy_optimizer, subgroups_come_and_go, sparse_all_reduce, coalesced,
    what_works_hold, calls_of_the_group_itself, recv_from_any_source, sequence_numbers, a_call_with_a_timeout,
    monitored_barrier,
]  # fmt: skip
