"""The units of a model that a job shards: found, checked, named, and read as they are before the job begins.

Owns ``ModelUnits``: the units in the model's order with their cell table, and which parameter of the model is where.
The order is that of ``model.modules()``, alike on all workers that built the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx._devices import is_host
from phalanx._torch_private import DisableTorchFunctionSubclass, post_accumulate_grad_hooks
from phalanx.elastic._materialise import fill_buffers, meta_modules
from phalanx.elastic.sharded._cell_table import CellTable, SectionShape, cell_table
from phalanx.elastic.sharded._cell_tensor import Key, LocalCells, ShardedParameter
from phalanx.elastic.sharded._pieces import Piece
from phalanx.fsdp.schedule._module_state import ModuleState, state_of
from phalanx.fsdp.unit._section import Section
from phalanx.fsdp.unit._unit import Unit
from phalanx.fsdp.unit._unit_gather import CopyGather
from phalanx.fsdp.unit._unit_memory import GatheredMemory


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on some module of ``model``."""
    return any(state_of(module) is not None for module in model.modules())


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of the model: its name there, and where its values are."""

    name: str
    key: Key
    shape: tuple[int, ...]
    extent: tuple[int, int]
    """Its elements of the section's flat vector."""
    requires_grad: bool
    is_cut: bool = False
    """Whether tensor parallelism has cut it: ``shape`` is that of this worker's shard."""


class ModelUnits:
    """All units of one model."""

    def __init__(self, model: nn.Module, *, matrices: bool) -> None:
        self.model = model
        self.states = _states(model)
        self.units: list[Unit] = [state.unit for state in self.states if state.unit is not None]
        _check(model, self.units)
        self.meta_modules = meta_modules(model)
        """Modules whose parameters and buffers have no values yet, with their paths."""
        for _, module in self.meta_modules:
            fill_buffers(module)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.all_names = {name: names[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
        """Of parameters; shared ones have several, and here the first of them."""
        self.state_names = list(model.state_dict())
        """What a state dict of the model has, in its order."""
        self.keys: dict[int, Key] = {}
        """By the ``id`` of the model's parameters, as they were before the job."""
        self.parameters: list[ModelParameter] = []
        for u, s, section in self.sections():
            for p, managed in enumerate(section.parameters):
                self.keys[id(managed.sharded)] = (u, s, p)
                self.parameters.append(
                    ModelParameter(
                        names[id(managed.sharded)],
                        (u, s, p),
                        managed.shape,
                        section.extents[p],
                        managed.sharded.requires_grad,
                        managed.shape != tuple(managed.sharded.shape),
                    )
                )
        by_name = {parameter.name: parameter for parameter in self.parameters}
        self.parameters = [by_name[name] for name in names.values()]
        self.local = {one.key: LocalCells(one.key, one.extent[0], is_cut=one.is_cut) for one in self.parameters}
        """What this worker has of each parameter."""
        shapes = [list(map(_shape, unit.sections)) for unit in self.units]
        self.table: CellTable = cell_table(shapes, whole_matrices=matrices)

    def sections(self) -> Iterator[tuple[int, int, Section]]:
        for u, unit in enumerate(self.units):
            for s, section in enumerate(unit.sections):
                yield u, s, section

    def put_placeholders(self) -> None:
        """Have modules hold what stands for their parameters between uses."""
        for parameter in self.parameters:
            u, s, p = parameter.key
            managed = self.units[u].sections[s].parameters[p]
            managed.sharded = ShardedParameter.like(managed.sharded, parameter.name, self.local[parameter.key])  # type: ignore[assignment]  # it passes for a parameter
            managed.register(managed.sharded)

    def show(self, pieces: Iterable[Piece]) -> None:
        """Have placeholders know the values that are here."""
        for local in self.local.values():
            local.parts = {}
        for piece in pieces:
            self.local[piece.key].parts[piece.begin, piece.end] = piece.tensor.detach()


def _shape(section: Section) -> SectionShape:
    return SectionShape(tuple(parameter.numel for parameter in section.parameters), section.dtype.itemsize)


def full_vector(unit: Unit, section: Section) -> Tensor:
    """Return the flat vector of a section that is still sharded by rows; all ranks of its mesh call it."""
    unit.release()
    unit.bring_home()
    assert section.storage is not None, "it was brought home"
    place = section.place
    memory = GatheredMemory(section.layout.length, section.dtype, section.place.device)
    gather = CopyGather(place.group, section.layout, memory, place.pool)
    gather.start(section.storage, unit.number, async_op=False)
    memory.take()
    memory.flat.zero_()  # what lies between two parameters
    gather.finish()
    return memory.flat


def _states(model: nn.Module) -> list[ModuleState]:
    root = state_of(model)
    if root is None:
        raise ValueError(
            "fully_shard was called on parts of the model and not on the model itself: a sharded job needs it on both, "
            "fully_shard(model) last"
        )
    if root.is_root is None:
        root.become_root()
    found: dict[ModuleState, None] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            found.setdefault(state)
    return list(found)


def _check(model: nn.Module, units: list[Unit]) -> None:
    managed = {id(parameter.sharded) for unit in units for parameter in unit.parameters}
    for name, parameter in model.named_parameters():
        if id(parameter) not in managed:
            raise ValueError(
                f"parameter {name!r} is in no unit (ignored_params=, or added after fully_shard): a sharded job needs "
                "all of them in units"
            )
    for unit in units:
        for each in unit.parameters:
            with DisableTorchFunctionSubclass():  # a DTensor would be gathered for it
                has_hooks = bool(each.sharded._backward_hooks)
            if post_accumulate_grad_hooks(each.local) or has_hooks:
                raise ValueError(
                    f"parameter {each.name!r} of {unit} has hooks on its gradient (an optimizer that steps inside of "
                    "backward, say): a sharded job sums gradients over all slots first, and steps in step.commit()"
                )
        if any(not is_host(section.place.device) for section in unit.sections):
            raise ValueError(f"{unit} is on {unit.place.device}; a sharded job runs on CPUs only as yet")


def trainable(parameters: list[ModelParameter]) -> list[ModelParameter]:
    """Return those that the job trains, in the model's order."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
