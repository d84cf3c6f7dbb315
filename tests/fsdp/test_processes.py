"""On real processes: gathering by mapping, a lost rank in the middle of a step, torch's distributed checkpoints."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from ddp.test_parity_torch import join_torch
from fsdp.models import assert_runs_close, batch, build, train
from fsdp.ranks import shard, trained
from fsdp.test_layouts import CPU, LAYOUTS, held_by
from phalanx.comm import init_device_mesh, use_group
from phalanx.fsdp.unit._mapped_gather import MappedGather, MappedMemory
from phalanx.fsdp.unit._unit_gather import part_length
from phalanx.fsdp.unit._unit_memory import HEADER, ShardStorage, pool_of
from phalanx.fsdp.unit._unit_order import numbers_of
from processes import run_processes

pytestmark = pytest.mark.timeout(300)


def _gather_every_layout(group: Any) -> None:
    """Two units at a time, so that slots are taken in turn; values differ by round."""
    kept = []
    number = numbers_of(group).add(torch.nn.Identity())
    for round_, (name, layout, extents) in enumerate(LAYOUTS):
        if layout.num_ranks != group.size:
            continue
        vector = torch.randn(layout.length, generator=torch.Generator().manual_seed(round_))
        storage = ShardStorage(group, part_length(layout), torch.float32, CPU)
        held = held_by(layout, group.rank, vector)
        storage.buffer[HEADER : HEADER + held.numel()] = held
        for dtype in (torch.float32, torch.bfloat16):
            gather = MappedGather(group, layout, MappedMemory(layout.length, dtype))
            gather.start(storage, number, async_op=False)
            gather.finish()
            kept.append((name, gather, extents, vector.to(dtype)))
            if len(kept) > 2:
                kept.pop(0)[1].release()
            for other, open_, where, expected in kept:
                for begin, end in where:
                    assert torch.equal(open_.flat[begin:end], expected[begin:end]), (name, other)


def _writes_stay_private(group: Any, model: Any) -> None:
    """A rank that writes to a gathered parameter hears of it; the others read what was gathered."""
    before = build("mlp").first.bias
    model.first.unshard()
    if group.rank == 1:
        with torch.no_grad():
            model.first.bias.fill_(7.0)
    group.barrier()
    if group.rank == 1:
        with pytest.raises(RuntimeError, match="written to in place"):
            model.first.reshard()
    else:
        assert torch.equal(model.first.bias, before)
        model.first.reshard()
    model.first.unshard()
    assert torch.equal(model.first.bias, before)
    model.first.reshard()


def _main(worker: Any, backend: str) -> str:
    group = worker.group(backend=backend, timeout=60)
    with use_group(group):
        mesh = init_device_mesh("cpu", (worker.size,))
        model = shard(build("mlp"), mesh)
        model(batch(0)).pow(2).mean().backward()
        if backend == "auto":
            assert group.backend == "shm"
            assert isinstance(model._get_fsdp_state().unit.sections[0].gather, MappedGather)
            _gather_every_layout(group)
            _writes_stay_private(group, model)
        if worker.rank == 1:  # before it has sent anything of that unit, which gloo begins to gather early
            second = model.second._get_fsdp_state().unit.sections[0].gather
            second.start = lambda *unused, **named: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"while gathering unit 'second', on rank \d of the group"):
            model(batch(0))
        group.abort()
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match=r"aborted.*while gathering unit 'root'"):
            model(batch(0))
        return "heard"


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_lost_rank_and_shared_memory(backend):
    outcomes = run_processes(3, _main, backend, timeout=280.0, check=False)
    assert [(o.value, o.error) for o in outcomes if o.rank != 1] == [("heard", "")] * 2
    assert outcomes[1].exit_code == -signal.SIGKILL, outcomes[1].error


def _replicas_on_one_host(worker: Any) -> int:
    """Train as one device does, and return how many buffers of their own the replicas have used."""
    group = worker.group(backend="auto")
    with use_group(group):
        mesh = init_device_mesh("cpu", (worker.size, 1), mesh_dim_names=("replicate", "shard"))
        model = shard(build("mlp"), mesh)

        def only_the_last(model: Any, last: bool) -> None:
            model.set_requires_all_reduce(last)

        found = trained(model, mesh, steps=3, accumulate=2, before_backward=only_the_last)
        assert_runs_close(found, train(build("mlp"), steps=3, accumulate=2), f"rank {worker.rank}")
        replicas = mesh.get_group("replicate")
        assert replicas.backend == "shm"
        return sum(map(len, pool_of(replicas)._free.values()))


@pytest.mark.parametrize(("size", "num_buffers"), [(2, 0), (3, 2)])
def test_replicas_of_one_host_add_up_in_memory_that_they_share(size, num_buffers):
    """Of three on; as many buffers as reductions are under way at once. Gradients are not in them."""
    for outcome in run_processes(size, _replicas_on_one_host, timeout=200.0):
        assert outcome.value == num_buffers


def _checkpoints(worker: Any, folder: str) -> None:
    join_torch(worker)
    try:
        with use_group(worker.group(backend="auto")):
            mesh = init_device_mesh("cpu", (worker.size,))
            model, fresh, other = (shard(build("tied"), mesh) for _ in range(3))
            optimizer = torch.optim.AdamW(model.parameters())
            model(batch(0)).pow(2).mean().backward()
            optimizer.step()
            expected = model(batch(1)).detach()  # with grad: the root is gathered now
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder)
            loaded = {"model": get_model_state_dict(fresh)}
            dcp.load(loaded, checkpoint_id=folder)
            set_model_state_dict(fresh, loaded["model"])
            torch.testing.assert_close(fresh(batch(1)), expected)
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            assert not worker.rank or not full
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(other, full, options=options)
            torch.testing.assert_close(other(batch(1)), expected)
            with pytest.raises(NotImplementedError, match="to_local"):
                save_file(state["model"], f"{folder}/shards.safetensors")
    finally:
        dist.destroy_process_group()


def _save_or_load(worker: Any, folder: str) -> Any:
    """Save on four ranks after a step, load on others; the model's values and what the next step makes of them."""
    join_torch(worker)
    try:
        with use_group(worker.group(backend="auto")):
            model = shard(build("tied"), init_device_mesh("cpu", (worker.size,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

            def step(number: int) -> None:
                model(batch(number)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            step(3)  # also makes the optimizer's state
            if worker.size == 4:
                step(0)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            if worker.size == 4:
                dcp.save(state, checkpoint_id=folder)
            else:
                dcp.load(state, checkpoint_id=folder)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            step(1)
            return [p.full_tensor().tolist() for p in model.parameters()]
    finally:
        dist.destroy_process_group()


def test_torchs_checkpoint_of_four_ranks_goes_on_with_two(tmp_path):
    folder = str(tmp_path)
    saved, loaded = (run_processes(size, _save_or_load, folder, timeout=140.0)[0].value for size in (4, 2))
    for one, other in zip(saved, loaded, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)


def test_torchs_checkpoints_and_state_dict_helpers(tmp_path):
    run_processes(2, _checkpoints, str(tmp_path), timeout=200.0)
