"""A group is a process group to torch: its tables, its calls beside ours, the end of a group, half-changed imports."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import Group, init_device_mesh, simulate, use_group
from phalanx.comm.stores import MemoryStore
from phalanx.errors import GroupAborted, PeerLost
from processes import Worker, run_processes


def registered() -> list[int]:
    """How many entries torch's tables of process groups have."""
    world = dist.distributed_c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    return [*map(len, tables), len(world.tags_to_pg), len(world.pg_coalesce_state)]


def alone(generation: int = 0) -> Group:
    return Group.create(MemoryStore(), 0, 1, backend="gloo", generation=generation)


@pytest.fixture(autouse=True)
def _clean() -> Any:
    assert not dist.is_initialized()
    assert not any(registered())
    yield
    assert not dist.is_initialized()
    assert not any(registered())


def test_rank_and_size_are_numbers_to_us_and_methods_to_torch() -> None:
    def main(group: Group) -> None:
        assert (group.rank(), group.size()) == (group.rank, group.size) == (group._transport.rank, 3)
        assert isinstance(group, dist.ProcessGroup)
        assert json.dumps({"size": group.size}) == '{"size": 3}'
        for copied in (pickle.loads(pickle.dumps(group.size)), copy.deepcopy(group.size)):
            assert copied == 3
            assert type(copied) is int

    simulate(3).run(main)


def test_torchs_calls_on_simulated_ranks() -> None:
    import torch.distributed._functional_collectives as functional

    def main(group: Group) -> tuple[list[float], str]:
        x = torch.full((2,), float(group.rank))
        dist.all_reduce(x, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(x, group=group, group_src=1)
        x = functional.all_reduce(x, "avg", group).clone()
        group.broadcast(x, 0)
        half = group.subgroup([0, 1])
        if half is not None:
            dist.barrier(group=half)
            with pytest.raises(ValueError, match="Default process group has not been initialized"):
                dist.get_rank(half)
        return x.tolist(), group.group_name

    found = simulate(3).run(main)
    assert [values for values, _ in found] == [[9.0, 9.0]] * 3
    assert len({name for _, name in found}) == 3, "each simulated rank's group has a name of its own"


def test_a_list_without_torchs_options_is_a_mistake() -> None:
    def main(group: Group) -> None:
        with pytest.raises(TypeError, match=r"broadcast got a list; expected a torch.Tensor"):
            group.broadcast([torch.ones(2)], 0)  # type: ignore[arg-type]

    simulate(2).run(main)


def test_regroups_leave_nothing_in_torchs_tables() -> None:
    def generation(number: int) -> list[int]:
        group = alone(number)
        group.make_default()
        part = group.subgroup([0])
        assert part is not None
        assert dist.get_rank(part) == 0
        assert dist.get_process_group_ranks(part) == [0]
        dist.all_reduce(torch.ones(2), group=part)
        assert part.group_name == "phalanx/local/sub/0/0", "the name that torch's caches know"
        full = registered()
        if number % 2:
            group.abort(PeerLost("a rank was lost", generation=number, ranks=(1,)))
            with pytest.raises(PeerLost, match="a rank was lost"):
                dist.all_reduce(torch.ones(2), group=part)
        else:
            group.close()
        assert not any(registered())
        return full

    first = generation(0)
    gc.collect()
    alive = sum(type(thing) is Group for thing in gc.get_objects())
    assert [generation(number) for number in range(1, 100)] == [first] * 99
    gc.collect()
    assert sum(type(thing) is Group for thing in gc.get_objects()) <= alive
    with pytest.raises(RuntimeError, match="Could not resolve"):
        dist.distributed_c10d._resolve_process_group("phalanx/local/sub/0/0")


def test_the_end_of_a_default_group_takes_no_living_group_with_it() -> None:
    old, new = alone(0), None
    try:
        old.make_default()
        new = alone(1)
        assert dist.get_rank(new) == 0
        old.close()
        new.all_reduce(torch.ones(2))
        new.make_default()
        assert dist.get_world_size(new) == 1
    finally:
        for group in (old, new):
            if group is not None:
                group.close()


def test_torch_destroys_our_groups_as_it_does_its_own() -> None:
    group = alone()
    group.make_default()
    first, second = group.subgroup([0]), group.subgroup([0])
    assert first is not None
    assert second is not None
    dist.destroy_process_group(first)
    with pytest.raises(GroupAborted, match="was closed"):
        first.all_reduce(torch.ones(2))
    second.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    with pytest.raises(GroupAborted, match="was closed"):
        second.all_reduce(torch.ones(2))
    group.close()


def test_a_group_of_other_ranks_than_torchs_is_not_numbered_by_torch() -> None:
    """``get_rank`` of it would be a guess."""
    group = Group.create(MemoryStore(), 0, 1, backend="gloo")
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    other = alone(1)
    try:
        with pytest.raises(ValueError, match="not registered"):
            dist.get_rank(other)
    finally:
        dist.destroy_process_group()
        group.close()
        other.close()


def many_calls_in_any_order(worker: Worker) -> bool:
    group = worker.group(backend="auto")
    random.seed(worker.rank)
    for step in range(60):
        theirs = [torch.full((50,), float(worker.rank + step + i)) for i in range(4)]
        works = [dist.all_reduce(x, group=group, async_op=True) for x in theirs[:3]]
        ours = torch.full((50,), float(worker.rank - step))
        time.sleep(random.random() / 1000)
        group.all_reduce(ours)  # behind torch's three on every rank, however far they are
        dist.all_reduce(theirs[3], group=group)
        for work in works:
            assert work is not None
            work.wait()
        ranks = range(worker.size)
        assert ours.tolist() == [float(sum(r - step for r in ranks))] * 50
        assert [x[0].item() for x in theirs] == [float(sum(r + step + i for r in ranks)) for i in range(4)]
    group.close()
    return True


def lose_a_rank(worker: Worker) -> dict[str, str]:
    import torch.distributed._functional_collectives as functional

    group = worker.group(backend="auto")
    group.make_default()
    part = group.subgroup(range(worker.size))
    assert part is not None
    dist.all_reduce(torch.ones(2), group=part)
    if worker.rank == worker.size - 1:
        os._exit(1)
    found = {}
    for name, call in {
        "blocking": lambda: dist.all_reduce(torch.ones(2), group=part),
        "async": lambda: dist.all_reduce(torch.ones(2), group=part, async_op=True).wait(),
        "functional": lambda: functional.all_reduce(torch.ones(2), "sum", part).clone(),
        "barrier": lambda: dist.barrier(group=part),
    }.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    group.abort()
    found["left"] = str(any(registered()))
    return found


@pytest.mark.timeout(200)
def test_torchs_calls_beside_ours_and_after_a_death() -> None:
    assert all(outcome.value for outcome in run_processes(2, many_calls_in_any_order, timeout=90))
    *survivors, _ = run_processes(3, lose_a_rank, timeout=90, check=False)
    for survivor in survivors:
        assert not survivor.error, survivor.error
        found = survivor.value
        assert found["left"] == "False"
        for name in ("blocking", "async", "functional", "barrier"):
            assert found[name].startswith("PeerLost"), found


def half_changed(worker: Worker) -> None:
    """Ours, given torch's meshes and groups; torch's, given ours."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.device_mesh import init_device_mesh as torchs_init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor as TorchDTensor

    from phalanx.ddp import DistributedDataParallel
    from phalanx.tensor import DTensor, Shard, distribute_tensor
    from phalanx.tensor.parallel import ColwiseParallel, parallelize_module

    store = worker.store().as_c10d()
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.size)
    theirs = torchs_init_device_mesh("cpu", (1, worker.size), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(8.0).reshape(4, 2)
    cut = distribute_tensor(whole, theirs["tp"], [Shard(0)])
    again = DTensor.from_local(cut.to_local(), theirs["tp"], [Shard(0)])
    mine = distribute_tensor(
        whole, init_device_mesh("cpu", (1, worker.size), mesh_dim_names=("dp", "tp"))["tp"], [Shard(0)]
    )
    for other in (cut, again):
        assert torch.equal((other + mine).full_tensor(), whole * 2), "meshes of one world mix"
    model = parallelize_module(torch.nn.Linear(2, 4), theirs["tp"], ColwiseParallel())
    assert model(whole).shape == (4, 4 // worker.size)
    for options in ({"device_mesh": theirs["tp"]}, {"process_group": theirs.get_group("tp")}, {"process_group": None}):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), **options)
        ddp(whole * worker.rank).sum().backward()
        assert ddp.module.weight.grad is not None
        assert ddp.module.weight.grad.tolist() == [[6.0, 8.0]]
    mesh = init_device_mesh("cpu", (worker.size,))
    assert isinstance(mesh.to_torch(), TorchMesh)
    with pytest.raises(TypeError, match=r"pass mesh.to_torch\(\)"):
        TorchDTensor.from_local(whole, mesh)
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    assert isinstance(sharded.weight, TorchDTensor)
    assert sharded.weight.device_mesh.mesh.tolist() == mesh.mesh.tolist()
    with pytest.raises(AttributeError, match=r"pass mesh.to_torch\(\)"):
        mesh._flatten_rank_map  # noqa: B018  # what a library of torch's might ask
    dist.barrier()
    dist.destroy_process_group()


def from_the_environment(worker: Worker, port: int) -> None:
    from phalanx.comm import current_group

    os.environ.update(RANK=str(worker.rank), WORLD_SIZE=str(worker.size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    mesh = init_device_mesh("cpu", (worker.size,), mesh_dim_names=("tp",))
    assert dist.is_initialized(), "as after torch's init_device_mesh"
    assert dist.get_rank() == worker.rank == mesh.get_rank()
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group())
    assert x.tolist() == [float(worker.size)] * 2
    special = init_device_mesh("cpu", (worker.size,), mesh_dim_names=("tp",), backend_override={"tp": "gloo"})
    assert special.get_group() is not mesh.get_group()
    assert special.get_group().backend == "gloo"
    assert special != mesh
    current_group().close()


@pytest.mark.timeout(200)
def test_ours_take_torchs_meshes_and_a_mesh_joins_from_the_environment() -> None:
    run_processes(2, half_changed, timeout=90)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_processes(2, from_the_environment, port, timeout=90)


def test_outside_of_a_launcher_a_mesh_is_refused_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh as torchs

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE"):
        monkeypatch.delenv(name, raising=False)
    for init in (torchs, init_device_mesh):
        with pytest.raises(ValueError, match="RANK"):
            init("cpu", (1,))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start the script with"):
        init_device_mesh("cpu", (1,))


def test_simulated_ranks_have_no_mesh_of_torchs() -> None:
    def main(group: Group) -> None:
        with use_group(group), pytest.raises(RuntimeError, match=r"make the mesh after phalanx.init\(\)"):
            init_device_mesh("cpu", (2,)).to_torch()

    simulate(2).run(main)
