"""Every rank of many meshes answers as torch.distributed.device_mesh does (on torch's fake process group)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh as reference
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx import comm
from phalanx.comm import Group

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore")]

SHAPES = [(1,), (4,), (2, 2), (3, 2), (1, 4), (4, 1), (2, 1, 3), (2, 3, 2), (2, 2, 2, 2)]
NAMES = ("a", "b", "c", "d")


def describe(mesh: Any, depth: int = 0) -> list[Any]:
    """What a mesh says about itself and about everything that can be cut from it."""
    names = mesh.mesh_dim_names
    seen: list[Any] = [
        mesh.mesh.tolist(),
        names,
        tuple(mesh.shape),
        mesh.ndim,
        mesh.size(),
        [mesh.size(i) for i in range(mesh.ndim)],
        mesh.get_coordinate() and tuple(mesh.get_coordinate()),
        mesh.get_rank(),
        [mesh.get_local_rank(i) for i in range(mesh.ndim)],
        repr(mesh),
        mesh._get_root_mesh().mesh.tolist(),
    ]
    if depth == 0:
        for count in range(1, mesh.ndim + 1):
            for chosen in itertools.permutations(names, count):
                seen.append(attempt(lambda c=chosen: describe(mesh[c], 1)))
        for count in range(2, mesh.ndim + 1):
            for chosen in itertools.combinations(names, count):
                flat = mesh[chosen]._flatten()
                seen.append(describe(flat, 1))
                for other in names:
                    seen.append(attempt(lambda c=(flat.mesh_dim_names[0], other): describe(mesh[c], 1)))
                    seen.append(attempt(lambda c=(other, flat.mesh_dim_names[0]): describe(mesh[c], 1)))
        for axis, size in enumerate(mesh.shape):
            if size % 2 == 0:
                seen.append(describe(mesh._unflatten(axis, (2, size // 2), ("x", "y")), 1))
    return seen


def attempt(act: Any) -> Any:
    try:
        return act()
    except (KeyError, RuntimeError, ValueError):
        return "refused"


def mesh_of(module: Any, shape: tuple[int, ...]) -> Any:
    return module.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])


@pytest.fixture
def fake_rank() -> Iterator[Any]:
    def start(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_agrees_with_torch(shape: tuple[int, ...], fake_rank: Any) -> None:
    def rank_main(group: Group) -> list[Any]:
        return describe(mesh_of(comm, shape))

    size = math.prod(shape)
    ours = comm.simulate(size).run(rank_main)
    for rank in range(size):
        fake_rank(rank, size)
        assert ours[rank] == describe(mesh_of(reference, shape)), f"rank {rank} of {shape}"


def test_equality_agrees_with_torch(fake_rank: Any) -> None:
    def pairs(module: Any) -> list[bool]:
        named = mesh_of(module, (2, 3, 2))
        meshes = [
            named,
            mesh_of(module, (2, 3, 2)),
            module.init_device_mesh("cpu", (2, 3, 2)),
            module.init_device_mesh("cpu", (3, 2, 2)),
            named["a"],
            named["b"],
            named["a", "b"],
            named["a", "b"]._flatten("ab"),
            module.DeviceMesh("cpu", list(range(12))),
            module.DeviceMesh("cpu", [[0, 1], [2, 3]]),
        ]
        return [x == y for x in meshes for y in meshes]

    ours = comm.simulate(12).run(lambda group: pairs(comm))
    for rank in (0, 5, 11):
        fake_rank(rank, 12)
        assert ours[rank] == pairs(reference)
