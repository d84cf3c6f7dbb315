"""Running a body on simulated ranks with a mesh, and comparing what they trained with one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fsdp.models import Run, assert_runs_close, build, train
from phalanx.comm import DeviceMesh, current_group, init_device_mesh, simulate
from phalanx.fsdp import fully_shard

AXES = ("replicate", "shard")


def on_ranks(body: Callable[[DeviceMesh], Any], *shape: int, names: tuple[str, ...] | None = None) -> list[Any]:
    """``body(mesh)`` on every rank of a mesh (shard), (replicate, shard), or with the names given."""
    axes = AXES[-len(shape) :] if names is None else names
    simulation = simulate(math.prod(shape))
    return simulation.run(lambda group: body(init_device_mesh("cpu", shape, mesh_dim_names=axes)))


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """``fully_shard`` of every block, then of the model."""
    for block in model.blocks():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(model: Any, data: DeviceMesh, **options: Any) -> Run:
    """Train on this rank's part of the data; losses are the mean over all."""
    rows, columns = data.shape if data.ndim == 2 else (1, *data.shape)
    where = data.get_coordinate()
    assert where is not None
    rank = where[0] * columns + where[1] if data.ndim == 2 else where[0]
    run = train(model, rank=rank, size=rows * columns, **options)
    losses = torch.tensor(run.losses)
    group = current_group()
    group.all_reduce(losses)
    run.losses = (losses / group.size).tolist()
    return run


def assert_as_one_device(
    body: Callable[[DeviceMesh], Run], kind: str, *shape: int, names: tuple[str, ...] | None = None, **options: Any
) -> None:
    """Each rank's run is that of one device on the whole batch, to rounding."""
    expected = train(build(kind), **options)
    for rank, run in enumerate(on_ranks(body, *shape, names=names)):
        assert_runs_close(run, expected, f"{kind} on {shape}, rank {rank}")
