"""``job_mesh``: the mesh on which the model of an elastic job is made tensor parallel, before workers have met.

Owns the mesh: a data parallel axis ``dp``, of one rank until the job brings workers together and cells take its place,
and the axis ``tp``, whose size is part of what the job computes and stays whatever happens to workers. The groups
behind ``tp`` are formed by the job, anew in every round (``sharded/_tensor_groups``).
"""

from __future__ import annotations

from typing import Any

from phalanx.comm import DeviceMesh, Group, current_group
from phalanx.comm.group._init import has_current_group
from phalanx.comm.stores import MemoryStore
from phalanx.comm.transports._interface import Transport
from phalanx.comm.transports._relay import Relay
from phalanx.world import World


def job_mesh(*, tp: int) -> DeviceMesh:
    """Return a mesh with the axes ``dp`` and ``tp`` for the model of an elastic job.

    Local rank r is at place ``r % tp``: so many neighbours on a node compute a slot together. Nothing is sent while
    the model is built: every worker builds the same values and keeps its shards (``src_data_rank=None``).

    >>> mesh = job_mesh(tp=2)
    >>> mesh.mesh_dim_names, mesh.shape
    (('dp', 'tp'), (1, 2))
    >>> parallelize_module(model, mesh["tp"], plan, src_data_rank=None)      # doctest: +SKIP
    >>> for block in model.blocks:                                           # doctest: +SKIP
    ...     fully_shard(block, mesh=mesh["dp"])
    >>> fully_shard(model, mesh=mesh["dp"])                                  # doctest: +SKIP
    """
    if type(tp) is not int or tp < 2:
        raise ValueError(
            f"job_mesh(tp={tp!r}): expected a number of workers, at least 2; for one leave tensor parallelism out"
        )
    local_rank = current_group().rank if has_current_group() else World.from_env().local_rank
    return mesh_at(local_rank % tp, tp)


def mesh_at(lane: int, num_lanes: int) -> DeviceMesh:
    """Return the mesh of a worker at this place of the axis ``tp``."""

    def alone(ranks: tuple[int, ...], name: str, **unused: Any) -> Transport:
        assert len(ranks) == 1, "the axis dp has one rank before the job begins"
        return Group.create(MemoryStore(), 0, 1)._transport

    tensor = Group(Relay(lane, num_lanes), ranks=range(num_lanes), make_subgroup=alone)
    data = tensor.subgroup([lane])
    assert data is not None, "this rank is in it"
    return DeviceMesh.from_group([data, tensor], "cpu", [list(range(num_lanes))], mesh_dim_names=("dp", "tp"))


def relay_of(mesh: DeviceMesh) -> Relay | None:
    """Return what carries the axis ``tp`` of a mesh that ``job_mesh`` made, or of a part of it; None for others."""
    parent = mesh._root.parent
    transport = None if parent is None else parent._transport
    return transport if isinstance(transport, Relay) else None
