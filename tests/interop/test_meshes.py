"""Torch's libraries, given our groups and meshes: the results that they have with torch's own on gloo."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from interop.programs_on_meshes import PROGRAMS, Kit
from interop.test_backend import assert_alike
from processes import Worker, run_processes

NUM_RANKS = 4


def torchs() -> Kit:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    return Kit(init_device_mesh, DeviceMesh, torch.nn.parallel.DistributedDataParallel, lambda mesh: mesh)


def ours() -> Kit:
    from phalanx.comm import DeviceMesh, init_device_mesh
    from phalanx.ddp import DistributedDataParallel

    return Kit(init_device_mesh, DeviceMesh, DistributedDataParallel, lambda mesh: mesh.to_torch())


def on_torchs_default_group(worker: Worker, place: str, program: Callable[[Kit], object], kit: Kit) -> object:
    """The script has called ``init_process_group("gloo")``, and takes the rest from us or from torch."""
    dist.init_process_group(
        "gloo",
        store=worker.store().namespace(place).as_c10d(),
        rank=worker.rank,
        world_size=worker.size,
        timeout=timedelta(seconds=60),
    )
    try:
        return program(kit)
    finally:
        dist.barrier()  # who leaves first is a lost peer to one that still forms a group
        dist.destroy_process_group()


def on_our_group(worker: Worker, place: str, program: Callable[[Kit], object]) -> object:
    """The script has called ``phalanx.init()``."""
    from phalanx.comm import Group, use_group

    store = worker.store().namespace(place)
    with Group.create(store, worker.rank, worker.size, timeout=60) as group, use_group(group):
        group.make_default()
        result = program(ours())
        group.barrier()
        return result


def run_all(worker: Worker, way: str) -> dict[str, object]:
    results: dict[str, object] = {}
    for number, program in enumerate(PROGRAMS):
        place = f"{way}/{number}"
        try:
            if way == "phalanx":
                result = on_our_group(worker, place, program)
            else:
                result = on_torchs_default_group(worker, place, program, torchs() if way == "gloo" else ours())
        except Exception:
            result = traceback.format_exc()
        results[program.__name__] = result
    return results


@functools.cache
def run_once(way: str) -> list[dict[str, object]] | Exception:
    """Of all programs; each way in processes of its own, since torch's DTensor keeps names of groups in its caches."""
    try:
        return [outcome.value for outcome in run_processes(NUM_RANKS, run_all, way, timeout=200)]
    except Exception as error:  # kept too: each test would start the processes again
        return error


def results(way: str) -> list[dict[str, object]]:
    found = run_once(way)
    if isinstance(found, Exception):
        raise RuntimeError(f"the processes of {way!r} gave no results") from found
    return found


@pytest.mark.timeout(450)
@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
@pytest.mark.parametrize("way", ["phalanx", "wrapped"])
def test_torch_takes_our_groups_and_meshes_for_its_own(program: str, way: str) -> None:
    assert any(of_rank[program] for of_rank in results("gloo")), "nothing to compare on any rank"
    for rank, (expected, found) in enumerate(zip(results("gloo"), results(way), strict=True)):
        assert_alike(rank, expected[program], found[program])
