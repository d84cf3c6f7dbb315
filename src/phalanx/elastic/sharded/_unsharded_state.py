"""Describes the state of a sharded job as the same job unsharded would have it, without collecting its tensors.

Owns the translation in both directions: ``owned_ranges`` (what this worker has of each tensor, under the names that a
save gives them), ``full_state`` (the whole tree, with something in the place of each large tensor), and
``read_fragments`` (a worker's cells out of a save's tensors). So saves are read at any number of workers, with any
number of copies and unsharded; and the digest is that of the unsharded job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.elastic.checkpoint._digest_tree import TensorDigest, range_nodes, root_of
from phalanx.elastic.checkpoint._saves import Manifest
from phalanx.elastic.checkpoint._state import State
from phalanx.elastic.checkpoint._state_codec import decode, dtype_from_name, encode
from phalanx.elastic.checkpoint._tensor_files import TensorFiles, TensorRange
from phalanx.elastic.checkpoint._tensor_names import optimizer_name
from phalanx.elastic.sharded._cell_store import Fragment
from phalanx.elastic.sharded._cell_tensor import Key
from phalanx.elastic.sharded._lane_saves import LaneFiles
from phalanx.elastic.sharded._model_units import ModelParameter
from phalanx.elastic.sharded._object_cells import KIND
from phalanx.elastic.sharded._pieces import Piece, is_by_element
from phalanx.fsdp.layout._unit_layout import Range, intersect

if TYPE_CHECKING:
    from phalanx.elastic.sharded._sharding import JobSharding

StandIn = Callable[[str, torch.dtype, tuple[int, ...]], Any]
"""Makes what stands in a state for the tensor of this name, dtype and shape."""


# ---- what this worker has


def owned_ranges(sharding: JobSharding) -> list[TensorRange]:
    """Return what this worker owns of the model's and the optimizer's tensors; the live values."""
    sharding.collect()
    return [
        one
        for parameter, piece, begin, end in _owned(sharding)
        for one in _ranges(sharding, parameter, piece, begin, end)
    ]


def _owned(sharding: JobSharding) -> Iterator[tuple[ModelParameter, Piece, int, int]]:
    """Yield owned ranges of parameters with the piece that each lies in, in elements of the section."""
    by_key = {parameter.key: parameter for parameter in sharding.units.parameters}
    rank = sharding.live_group.rank
    for piece in sharding.store.pieces:
        owned = sharding.store.sections[piece.key[:2]].layout.owned[rank]
        for begin, end in intersect(owned, [(piece.begin, piece.end)]):
            yield by_key[piece.key], piece, begin, end


def _ranges(
    sharding: JobSharding, parameter: ModelParameter, piece: Piece, begin: int, end: int
) -> Iterator[TensorRange]:
    first = parameter.extent[0]
    place: Range = (begin - first, end - first)
    there = slice(begin - piece.begin, end - piece.begin)
    yield TensorRange(parameter.name, parameter.shape, *place, piece.tensor.detach().reshape(-1)[there])
    number = sharding.pieces.numbers.get(parameter.key)
    for key, value in piece.states.get("optimizer", {}).items():
        if number is None or not isinstance(value, Tensor):
            continue
        name = optimizer_name(number, key)
        if is_by_element(value, piece.tensor.numel(), piece.tensor.shape):
            yield TensorRange(name, parameter.shape, *place, value.reshape(-1)[there])
        elif begin == first:
            yield TensorRange.of(name, value)
    for name, value in piece.states.get(KIND, {}).items():
        yield TensorRange(name, parameter.shape, *place, value.reshape(-1)[there])


# ---- the whole tree


def full_state(sharding: JobSharding, stand_in: StandIn) -> State:
    """Return the job's state as unsharded; all workers call it. ``stand_in`` is asked for each tensor in cells."""
    sharding.collect()  # states that the optimizer has made since cells last moved
    state = sharding.job.state_dict()
    small = state["parts"]
    model = {
        parameter.name: stand_in(parameter.name, sharding.dtype_of(parameter.key), parameter.shape)
        for parameter in sharding.units.parameters
    }
    named = sharding.with_all_names(model, small["buffers"])
    parts = {
        "model": named,
        "buffers": {name: value for name, value in small["buffers"].items() if name not in named},
        "optimizer": {
            "state": _optimizer_states(sharding, stand_in),
            "param_groups": _groups(sharding, small["groups"]),
        },
        "others": sharding.objects.filled(small["others"], stand_in),
    }
    return {**state, "parts": parts}


def _optimizer_states(sharding: JobSharding, stand_in: StandIn) -> dict[int, State]:
    """Return the optimizer's states by its parameters' numbers; each is told by who owns the start of the parameter."""
    mine: dict[str, Any] = {}
    for parameter, piece, begin, _ in _owned(sharding):
        number = sharding.pieces.numbers.get(parameter.key)
        if number is not None and begin == parameter.extent[0] and piece.states.get("optimizer"):
            mine[str(number)] = [
                _tell(key, value, piece, parameter) for key, value in piece.states["optimizer"].items()
            ]
    found: dict[int, State] = {}
    for told in sharding.live_group.all_gather_values(mine):
        for number, entries in told.items():
            found[int(number)] = {
                key: decode(value, [])
                if dtype is None
                else stand_in(optimizer_name(int(number), key), dtype_from_name(dtype), tuple(value))
                for key, dtype, value in entries
            }
    return dict(sorted(found.items()))


def _tell(key: str, value: Any, piece: Piece, parameter: ModelParameter) -> list[Any]:
    """Return a value of an optimizer's state as JSON: (key, dtype, shape) of a tensor, (key, None, value) else."""
    if not isinstance(value, Tensor):
        return [key, None, encode(value)[0]]
    by_element = is_by_element(value, piece.tensor.numel(), piece.tensor.shape)
    return [key, str(value.dtype).removeprefix("torch."), list(parameter.shape if by_element else value.shape)]


def _groups(sharding: JobSharding, options: Sequence[State]) -> list[State]:
    numbers = iter(range(sum(sharding.pieces.group_sizes)))
    return [
        {**group, "params": [next(numbers) for _ in range(count)]}
        for group, count in zip(options, sharding.pieces.group_sizes, strict=True)
    ]


def meta_tensors() -> StandIn:
    """Return stand-ins for a save whose values are in the ranges of all workers."""
    return lambda name, dtype, shape: torch.empty(shape, dtype=dtype, device="meta")


def digests(sharding: JobSharding) -> StandIn:
    """Return stand-ins for a digest: the roots over what all workers tell of their ranges; all call it."""
    mine: dict[str, list[Any]] = {}
    for one in owned_ranges(sharding):
        nodes = range_nodes(one.values, one.begin, torch.Size(one.shape).numel())
        mine.setdefault(one.name, []).extend([*node, value.hex()] for node, value in nodes.items())
    known: dict[str, dict[tuple[int, int], bytes]] = {}
    for told in sharding.live_group.all_gather_values(mine):
        for name, nodes in told.items():
            known.setdefault(name, {}).update({(low, high): bytes.fromhex(text) for low, high, text in nodes})
    return lambda name, dtype, shape: TensorDigest(
        dtype, shape, root_of(torch.Size(shape).numel(), known.get(name, {}))
    )


# ---- out of a save


def small_state(sharding: JobSharding, manifest: Manifest) -> State:
    """Return the state of a save without what belongs to cells."""
    names = {parameter.name for parameter in sharding.units.parameters}
    state: State = manifest.state(lambda name: name in names or name.startswith(("optimizer.state.", "others.")))
    with manifest.open() as files:
        parts = state["parts"]
        read = sharding.objects.with_small(parts["others"], manifest.names, lambda name: files.read(name).clone())
        parts["others"] = read
    lane = sharding.lane_saves()
    if lane is not None:
        parts["optimizer"] = {**parts["optimizer"], "state": lane.of_lane(parts["optimizer"]["state"])}
    return state


def read_fragments(
    sharding: JobSharding, state: Mapping[str, Any], saved: Manifest, held: Mapping[tuple[int, int], Sequence[Range]]
) -> list[Fragment]:
    """Read what this worker is to hold: ``held`` ranges by section. ``state`` is what ``small_state`` returned."""
    lane = sharding.lane_saves()
    with saved.open() as files:
        return _read(sharding, state, saved, files if lane is None else lane.reader(files), held)


def _read(
    sharding: JobSharding,
    state: Mapping[str, Any],
    saved: Manifest,
    files: TensorFiles | LaneFiles,
    held: Mapping[tuple[int, int], Sequence[Range]],
) -> list[Fragment]:
    states = state["parts"]["optimizer"]["state"]
    in_objects: dict[Key, list[str]] = {}
    for name, parameter in sharding.objects.in_save(state["parts"]["others"], saved.names).items():
        in_objects.setdefault(parameter.key, []).append(name)
    found = []
    for parameter in sharding.units.parameters:
        first = parameter.extent[0]
        number = sharding.pieces.numbers.get(parameter.key)
        known = {} if number is None else states.get(number, states.get(str(number), {}))
        for begin, end in intersect(held[parameter.key[:2]], [parameter.extent]):
            a, b = begin - first, end - first
            values = files.read(parameter.name, a, b)
            own: State = {}
            for key, value in known.items():
                name = optimizer_name(number or 0, key)
                if not isinstance(value, Tensor):
                    own[key] = value
                elif not sharding.pieces.matrices and is_by_element(
                    value, torch.Size(parameter.shape).numel(), parameter.shape
                ):
                    own[key] = files.read(name, a, b)
                else:
                    own[key] = files.read(name).clone()
            kinds = {"optimizer": own} if own else {}
            if parameter.key in in_objects:
                shape = parameter.shape if sharding.pieces.matrices else (b - a,)
                kinds[KIND] = {name: files.read(name, a, b).view(shape) for name in in_objects[parameter.key]}
            found.append(Fragment(parameter.key, begin, end, values, kinds))
    return found
