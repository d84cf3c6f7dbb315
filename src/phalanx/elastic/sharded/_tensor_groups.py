"""Groups of a tensor parallel job: who this worker computes with, whose cells it holds, and what all lanes agree on.

Owns ``TensorGroups``: the lane of this worker, the groups of a round (that of its lane, and the tensor parallel one
behind the relay of the model's mesh), and what is known of parameters across lanes (sharded or the same in all). The
cells of a lane are those of a job by itself; what makes one job of the lanes is here: the verdict of all at the commit
point, wishes, digests, the whole model.

Invariant: the commit point is a collective of all workers of all lanes, entered when prepared. So whoever passes it
knows that every lane can make the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.comm import Group
from phalanx.comm.transports._relay import Relay, RelayDriver
from phalanx.elastic._job_mesh import relay_of
from phalanx.elastic.checkpoint._digest_tree import TensorDigest
from phalanx.elastic.checkpoint._state import State, digest
from phalanx.elastic.checkpoint._tensor_files import Chunk
from phalanx.elastic.membership._sync import WorkersDiffer
from phalanx.elastic.sharded._lanes import Lanes, arrange
from phalanx.elastic.sharded._slot_numbers import WISHES, StepNumbers
from phalanx.elastic.sharded._verdict import StepVerdict
from phalanx.fsdp.unit._parameter import ManagedParameter
from phalanx.fsdp.unit._unit import Unit
from phalanx.tensor import Shard
from phalanx.tensor.core._dtensor import wrap

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding

NO_NORM = -1.0


def find_relay(units: Sequence[Unit]) -> Relay | None:
    """Return what carries the model's tensor parallel axis; None if there is none.

    Raises ``ValueError`` for parameters that are distributed on another mesh than that of ``job_mesh``.
    """
    found: dict[Relay | None, ManagedParameter] = {}
    for unit in units:
        for each in unit.parameters:
            relay = relay_of(each.spec.mesh)
            found.setdefault(relay, each)
            if relay is None and each.inner_spec is not None:
                raise ValueError(
                    f"parameter {each.name!r} of {unit} is distributed as {each.inner_spec!r} on a mesh whose groups "
                    "end with the first worker that is lost: build the model on phalanx.elastic.job_mesh(tp=...), "
                    "whose groups the job forms anew"
                )
    if len(found) > 1:
        names = " and ".join(repr(each.name) for each in list(found.values())[:2])
        raise ValueError(
            f"parameters {names} are on different meshes: make one mesh, phalanx.elastic.job_mesh(tp=...), and give "
            "mesh['tp'] to parallelize_module and mesh['dp'] to every fully_shard"
        )
    return next(iter(found), None)


def check_possible(units: Sequence[Unit], *, matrices: bool, has_state: bool, in_objects: Sequence[str]) -> None:
    """Refuse what a tensor parallel job cannot do yet, where it would be wrong or is not built."""
    for unit in units:
        for each in unit.parameters:
            if each.local.is_meta:
                raise ValueError(
                    f"parameter {each.name!r} of {unit} is on the meta device: a tensor parallel job takes the initial "
                    "values that every worker builds. Build the model in real memory"
                )
            for dim, count in _cuts(each):
                shape = tuple(each.sharded.shape)
                if shape[dim] % count:
                    raise ValueError(
                        f"parameter {each.name!r} of {unit}, shape {shape}, is sharded by tensor parallelism on dim "
                        f"{dim}, which {count} workers do not divide evenly: workers of a job hold equal shards"
                    )
    for is_given, what, remedy in (
        (matrices, "an optimizer that needs whole matrices", "Use one that treats every element alike: AdamW, SGD"),
        (has_state, "an optimizer that has state already", "Make the optimizer anew"),
        (
            bool(in_objects),
            f"state= with what is laid out like parameters ({', '.join(in_objects[:3])})",
            "Keep averages of the weights outside of the job, or leave them out",
        ),
    ):
        if is_given:
            raise ValueError(f"{what} with a tensor parallel model is not supported yet. {remedy}")


def _cuts(parameter: ManagedParameter) -> list[tuple[int, int]]:
    """Return the dims of a parameter that tensor parallelism has cut, and into how many."""
    spec = parameter.inner_spec
    if spec is None:
        return []
    return [(p.dim, spec.mesh.shape[axis]) for axis, p in enumerate(spec.placements) if isinstance(p, Shard)]


class TensorGroups:
    """This worker's side of the tensor parallel groups of one job."""

    def __init__(self, relay: Relay, units: Sequence[Unit], names: Mapping[tuple[int, int, int], str]) -> None:
        self.relay = relay
        self.lane, self.num_lanes = relay.rank, relay.size
        self.lanes: Lanes | None = None
        """Of the round."""
        self._group: Group | None = None
        self._managed = {
            names[u, s, p]: each
            for u, unit in enumerate(units)
            for s, section in enumerate(unit.sections)
            for p, each in enumerate(section.parameters)
        }
        """By the parameters' names in the model."""

    def is_cut(self, name: str) -> bool:
        """Return whether lanes have different shards of a parameter."""
        return bool(_cuts(self._managed[name]))

    def chunk(self, name: str) -> Chunk | None:
        """Return which part of a parameter this lane has; None of one that is the same in all lanes."""
        cuts = _cuts(self._managed[name])
        assert len(cuts) < 2, "the mesh has one axis besides that of the units"
        return Chunk(cuts[0][0], self.lane, cuts[0][1]) if cuts else None

    def whole_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._managed[name].sharded.shape)

    def counts_in_norm(self, name: str) -> bool:
        """Return whether this lane's gradient of a parameter is part of the norm: once, if it is the same in all."""
        return self.lane == 0 or self.is_cut(name)

    # ---- places

    def form(
        self, everyone: Group, told: Sequence[int], nodes: Sequence[str], workers: Sequence[str], driver: RelayDriver
    ) -> Group:
        """Take a place in a round, from the lane and the node of all; return the group of this worker's lane."""
        lanes = self.lanes = arrange(told, nodes, self.num_lanes)
        if not all(lanes.members):
            raise ValueError(
                f"of workers {', '.join(workers)} none is at place {lanes.members.index(())} of {self.num_lanes} of "
                f"the model's tensor parallel axis: run at least {self.num_lanes} workers on a node, a multiple of it "
                "for all to have work (--nproc-per-node), and leave LOCAL_RANK as the launcher sets it"
            )
        self.relay.unbind()
        lane = everyone.subgroup(lanes.members[self.lane])
        group = lanes.group_of(everyone.rank)
        self._group = None if group is None else everyone.subgroup(group)
        if self._group is not None:
            self.relay.bind(self._group._transport, driver)
        assert lane is not None, "this worker is in its lane"
        return lane

    @property
    def num_computing(self) -> int:
        assert self.lanes is not None, "the job has a place"
        return self.lanes.num_groups

    # ---- what all lanes agree on

    def join_verdicts(self, everyone: Group, mine: StepVerdict) -> StepVerdict:
        """Pass the commit point, with the verdict of this lane's owners; return that of all lanes."""
        norm = NO_NORM if mine.norm is None else mine.norm
        told = torch.empty(everyone.size, 4, dtype=torch.float64)
        row = torch.tensor([self.lane, not mine.is_finite, mine.found_inf, norm], dtype=torch.float64)
        everyone.all_gather_into_tensor(told.view(-1), row)
        rows = told.tolist()
        by_lane = {int(lane): norm for lane, _, _, norm in rows}
        total = None if mine.norm is None else math.sqrt(math.fsum(by_lane[at] ** 2 for at in sorted(by_lane)))
        return replace(mine, is_finite=not any(r[1] for r in rows), found_inf=any(r[2] for r in rows), norm=total)

    def join_numbers(self, everyone: Group, numbers: StepNumbers, rank: int) -> StepNumbers:
        """Return the numbers with what workers of all lanes want; ``rank`` is this worker's in its lane."""
        mine = torch.tensor([numbers.wishes[rank][name] for name in WISHES], dtype=torch.float64)
        told = torch.empty(everyone.size, len(WISHES), dtype=torch.float64)
        everyone.all_gather_into_tensor(told.view(-1), mine)
        most = dict(zip(WISHES, told.amax(0).tolist(), strict=True))
        saves = {name: most[name] for name in ("asked", "answered")}  # lanes save together
        wishes = tuple({**one, **saves} for one in numbers.wishes)
        sums = {**numbers.sums, **dict(zip(WISHES, told.sum(0).tolist(), strict=True))}
        return replace(numbers, sums=sums, wishes=wishes)

    def join_digests(self, everyone: Group, workers: Sequence[str], state: State) -> str:
        """Return the digest of all lanes. Raises ``WorkersDiffer`` if a parameter that is not cut differs by lane."""
        model = state["parts"]["model"]
        whole = {
            name: [value.root.hex()]
            for name, value in model.items()
            if isinstance(value, TensorDigest) and name in self._managed and not self.is_cut(name)
        }
        mine = {"lane": self.lane, "digest": digest({"parts": state["parts"], "sampler": state["sampler"]})}
        told: list[Any] = everyone.all_gather_values({**mine, "whole": whole})
        for worker, one in zip(workers, told, strict=True):
            different = [name for name, value in told[0]["whole"].items() if one["whole"].get(name) != value]
            if different:
                raise WorkersDiffer(
                    f"workers {workers[0]} and {worker}, of lanes {told[0]['lane']} and {one['lane']}, differ in "
                    f"{different[0]}, which tensor parallelism has not cut: every worker must build the same initial "
                    "values (torch.manual_seed before the model is made)"
                )
        by_lane = {one["lane"]: one["digest"] for one in told}
        return digest({"lanes": [by_lane[lane] for lane in range(self.num_lanes)]})

    def whole_parameters(self, sharding: JobSharding, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole parameters on all workers; ``found`` are the lane's, on the first worker of each lane."""
        assert self.lanes is not None, "the job has a place"
        first, everyone = self.lanes.groups[0], sharding.everyone
        whole = {}
        for name, each in self._managed.items():
            dtype = sharding.dtype_of_name(name)
            tensor = torch.empty(tuple(each.sharded.shape), dtype=dtype)
            if everyone.rank in first:
                mine = found[name]
                if each.inner_spec is not None:
                    mine = wrap(mine, each.inner_spec.with_dtype(dtype)).full_tensor()
                tensor.copy_(mine)
            everyone.broadcast(tensor, first[0])
            whole[name] = tensor
        return whole
