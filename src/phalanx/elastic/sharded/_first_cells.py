"""Moves the model that ``fully_shard`` left, and what the optimizer and the objects have for it, into cells.

Done once, by all workers of a job that begins, unit by unit. A unit that was built on the meta device is given memory
and initial values (``_materialise``) and cut before the next one is, so no worker ever has the whole model. Workers
whose values differ get rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.elastic._materialise import initialise
from phalanx.elastic.sharded._cell_store import Fragment
from phalanx.elastic.sharded._holdings import Holdings
from phalanx.elastic.sharded._model_units import as_bytes, full_vector
from phalanx.elastic.sharded._object_cells import KIND
from phalanx.elastic.sharded._pieces import cut_state
from phalanx.fsdp.layout._unit_layout import Range, intersect
from phalanx.fsdp.unit._unit import Unit

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding


def make_cells(sharding: JobSharding, holdings: Holdings) -> None:
    """Hold what ``holdings`` says of the model as it is now; all workers call it."""
    units, group = sharding.units, sharding.live_group
    sharding.objects.agree(group)
    sharding.pieces.release()
    fragments: list[Fragment] = []
    _initialise_rest(sharding)
    for u, unit in enumerate(units.units):
        for s, flat in enumerate(_vectors(sharding, unit)):
            told = group.all_gather_values(hashlib.sha256(as_bytes(flat).numpy().data).hexdigest())
            if any(one != told[0] for one in told):
                group.broadcast(flat, 0)
            layout = sharding.store.layout(u, s, holdings, sharding.workers)
            fragments += _cut(sharding, (u, s), flat, layout.held[group.rank])
    sharding.objects.forget_initial()
    units.put_placeholders()
    sharding.settle(holdings, fragments)


def _vectors(sharding: JobSharding, unit: Unit) -> list[Tensor]:
    """Return the flat vectors of a unit's sections."""
    on_meta = [parameter.name for parameter in unit.parameters if parameter.local.is_meta]
    if not on_meta:
        return [full_vector(unit, section) for section in unit.sections]
    if len(on_meta) < len(unit.parameters):
        raise ValueError(
            f"{on_meta[0]!r} of {unit} is on the meta device and other parameters of the unit are not: build all of "
            "it there, or none"
        )
    flats = [torch.zeros(section.layout.length, dtype=section.dtype) for section in unit.sections]
    made: dict[tuple[nn.Module, str], nn.Parameter] = {}
    for section, flat in zip(unit.sections, flats, strict=True):
        for parameter, (begin, end) in zip(section.parameters, section.extents, strict=True):
            values = flat[begin:end].view(parameter.shape)
            fresh = nn.Parameter(values, parameter.sharded.requires_grad)
            made |= dict.fromkeys(parameter.places, fresh)
            parameter.register(fresh)
    modules = {module for module, _ in made}
    for path, module in sharding.units.meta_modules:
        if module in modules:
            own = {key: parameter for (place, key), parameter in made.items() if place is module}
            initialise(module, path, sharding.job.seed, own)
    for parameter in unit.parameters:
        parameter.register(parameter.sharded)
    return flats


def _initialise_rest(sharding: JobSharding) -> None:
    """Give modules without parameters their buffers."""
    managed = {module for unit in sharding.units.units for one in unit.parameters for module, _ in one.places}
    for path, module in sharding.units.meta_modules:
        if module not in managed:
            initialise(module, path, sharding.job.seed, {})


def _cut(sharding: JobSharding, section: tuple[int, int], flat: Tensor, held: Sequence[Range]) -> list[Fragment]:
    """Return what this worker will hold of a section, with the state that optimizer and objects had for it."""
    found = []
    for parameter in sharding.units.parameters:
        if parameter.key[:2] != section:
            continue
        first = parameter.extent[0]
        for begin, end in intersect(held, [parameter.extent]):
            values = flat[begin:end].clone()
            a, b = begin - first, end - first
            states = {}
            known, is_complete = sharding.pieces.initial.get(parameter.key), sharding.pieces.matrices
            if known is not None:
                states["optimizer"] = dict(known) if is_complete else cut_state(known, parameter.shape, a, b)
            shape = parameter.shape if is_complete else (b - a,)
            if own := sharding.objects.initial(parameter, a, b, values, shape):
                states[KIND] = own
            found.append(Fragment(parameter.key, begin, end, values, states))
    return found
