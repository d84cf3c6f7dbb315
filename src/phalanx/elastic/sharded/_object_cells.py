"""ObjectCells: averages of the weights and other values of ``Job(state=...)`` that are laid out like parameters.

A tensor of an object's state dict belongs to a parameter if its place there is named as the parameter is
(``module.layers.0.weight``) and it has its shape, or if it is in a list of tensors that has one for every parameter (or
every trained one) of the model, in order. Such values are kept by cells, as the optimizer's state is: mirrored,
moved, saved, digested. Everything else in the objects is small, and every worker has it.

Owns: which values these are (``parameters_in``), their exchange for ``CellTensor`` in the objects, and the way between
those and the pieces' states. When a worker rolls a step forward, its cells of the objects stay its own: its loop has
yet to run what follows the commit, on the cells as on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._torch_private import module_parameters
from phalanx.comm import Group
from phalanx.elastic._materialise import fill_buffers
from phalanx.elastic.checkpoint._state import State, Stateful, digest
from phalanx.elastic.checkpoint._state_codec import dtype_from_name
from phalanx.elastic.sharded._cell_tensor import CellTensor, CellValue, FormerShard, LocalCells, ShardedParameter
from phalanx.elastic.sharded._model_units import ModelParameter, ModelUnits
from phalanx.elastic.sharded._pieces import Piece
from phalanx.tensor import DTensor

Path = tuple[str, ...]
KIND = "objects"
"""Of the pieces' states."""
IN_CELLS = "\0cells"
"""Key of what stands in a small state for a value that is in cells."""


def name_of(path: Path) -> str:
    """Return the name that a save gives a tensor of the objects."""
    return ".".join(("others", *path))


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything in a state that is no container, with its place."""
    if isinstance(tree, Mapping) and IN_CELLS not in tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, str(number)))
    else:
        yield path, tree


def with_leaves(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of a state with other leaves."""
    if isinstance(tree, Mapping) and IN_CELLS not in tree:
        return {key: with_leaves(value, change, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [with_leaves(value, change, (*path, str(number))) for number, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return change(path, tree)


def parameters_in(tree: Any, parameters: Sequence[ModelParameter], names: Mapping[str, ModelParameter]) -> Any:
    """Return by place which tensors of the objects' states belong to which parameters; ``names`` has all names."""
    tensors = {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    found: dict[Path, ModelParameter] = {}
    for path, tensor in tensors.items():
        parts = ".".join(path).split(".")
        named = (names.get(".".join(parts[start:])) for start in range(1, len(parts)))  # the longest name first
        match = next((one for one in named if one is not None), None)
        if match is not None and tuple(tensor.shape) == match.shape:
            found[path] = match
    for some in (parameters, [one for one in parameters if one.requires_grad]):
        for place in {path[:-1] for path in tensors if path[-1:] == ("0",)}:
            listed = [(*place, str(number)) for number in range(len(some))]
            count = sum(path[:-1] == place for path in tensors)
            if count == len(some) and all(
                path in tensors and tuple(tensors[path].shape) == one.shape
                for path, one in zip(listed, some, strict=True)
            ):
                for path, one in zip(listed, some, strict=True):
                    found.setdefault(path, one)
    return found


class ObjectCells:
    """The cells of one job's objects on this worker."""

    def __init__(self, units: ModelUnits, objects: Mapping[str, Stateful]) -> None:
        self._units = units
        self._objects = dict(objects)
        by_name = {one.name: one for one in units.parameters}
        self._names = {name: by_name[first] for name, first in units.all_names.items()}
        self._initial: dict[str, Tensor] = {}
        """Values that the objects had when the job began, of whole parameters."""

    # ---- in the objects

    def convert(self) -> None:
        """Have the objects hold cells where they held tensors like parameters; their values are kept aside."""
        for name, one in self._objects.items():
            for inner in one.modules() if isinstance(one, nn.Module) else ():
                fill_buffers(inner)
            found = self._parameters_of({name: one.state_dict()})
            live = {}
            for path, leaf in leaves({name: one.state_dict()}):
                if path in found:
                    live[path] = leaf
                elif isinstance(leaf, Tensor) and leaf.is_meta:
                    raise ValueError(
                        f"state[{name!r}] has a tensor on the meta device that is laid out like no parameter "
                        f"({name_of(path)}, shape {tuple(leaf.shape)}): build it in real memory"
                    )
            made: dict[int, Any] = {}
            modules = _places(one, name) if isinstance(one, nn.Module) else {}
            for path, tensor in live.items():
                if isinstance(tensor, CellValue):
                    continue
                module, key = modules.get(path) or (None, "")
                place = id(tensor) if module is None else id(module_parameters(module)[key])
                is_new = place not in made
                if is_new:
                    made[place] = self._make(found[path], tensor, _kind(tensor, is_in_module=module is not None))
                    self._initial[name_of(path)] = _full(tensor)
                if module is not None:
                    module_parameters(module)[key] = made[place]
                elif is_new:
                    torch.utils.swap_tensors(tensor, made[place])
            missed = [path for path in found if not isinstance(_at(one.state_dict(), path[1:]), CellValue)]
            if missed:
                raise ValueError(
                    f"state[{name!r}] gives copies of its tensors in state_dict() ({name_of(missed[0])}): in a sharded "
                    "job those that are shaped like parameters are kept in cells; return the tensors themselves"
                )

    def of_parameters(self) -> list[str]:
        """Return the names of what is laid out like parameters, or is distributed as they are."""
        tree = {name: one.state_dict() for name, one in self._objects.items()}
        found = self._parameters_of(tree)
        return [name_of(path) for path, leaf in leaves(tree) if path in found or isinstance(leaf, DTensor)]

    def _make(self, parameter: ModelParameter, like: Tensor, kind: type[CellValue]) -> Any:
        return kind.make(like.detach(), parameter.name, LocalCells(parameter.key, parameter.extent[0]))

    def _parameters_of(self, tree: Any) -> dict[Path, ModelParameter]:
        found: dict[Path, ModelParameter] = parameters_in(tree, self._units.parameters, self._names)
        return found

    def _live(self) -> dict[Path, Any]:
        """Return what the objects hold in cells."""
        states = {name: one.state_dict() for name, one in self._objects.items()}
        return {path: leaf for path, leaf in leaves(states) if isinstance(leaf, CellValue)}

    def names(self) -> dict[int, str]:
        """Return by ``id`` of their cells the names of the values; one that stands in several places has one."""
        found: dict[int, str] = {}
        for path, tensor in self._live().items():
            found.setdefault(id(tensor._cells), name_of(path))
        return found

    # ---- to and from pieces

    def collect(self, pieces: Iterable[Piece]) -> None:
        """Give the pieces the states that the objects have."""
        by_key: dict[Any, list[LocalCells]] = {}
        names = self.names()
        for tensor in self._live().values():
            if tensor._cells not in by_key.setdefault(tensor._cells.key, []):
                by_key[tensor._cells.key].append(tensor._cells)
        for piece in pieces:
            piece.states.pop(KIND, None)
            for cells in by_key.get(piece.key, []):
                part = cells.parts.get((piece.begin, piece.end))
                if part is None:
                    raise RuntimeError(
                        f"{names[id(cells)]} has no values where this worker holds cells: it was made before cells "
                        "moved and came into the objects of Job(state=...) afterwards; update what is there in place"
                    )
                piece.states.setdefault(KIND, {})[names[id(cells)]] = part

    def use(self, pieces: Iterable[Piece]) -> None:
        """Have the objects hold what the pieces' states are."""
        live, names = self._live(), self.names()
        by_key: dict[Any, list[Piece]] = {}
        for piece in pieces:
            by_key.setdefault(piece.key, []).append(piece)
        for tensor in live.values():
            name, cells = names[id(tensor._cells)], tensor._cells
            cells.parts = {
                (piece.begin, piece.end): piece.states[KIND][name] for piece in by_key.get(tensor._cells.key, [])
            }

    # ---- at the start

    def agree(self, group: Group) -> None:
        """Take rank 0's initial values where workers differ; all of them call it."""
        mine = {name: digest(value) for name, value in self._initial.items() if not value.is_meta}
        told = group.all_gather_values(mine)
        for name in mine:
            if any(one.get(name) != told[0].get(name) for one in told):
                group.broadcast(self._initial[name], 0)

    def initial(self, parameter: ModelParameter, begin: int, end: int, values: Tensor, shape: Sequence[int]) -> State:
        """Return the states of elements of a parameter, counted from its first, at the start.

        What has no values (it was made on the meta device) begins as the parameter does, whose ``values`` these are.
        """
        found: State = {}
        names = self.names()
        for tensor in self._live().values():
            name = names[id(tensor._cells)]
            if tensor._cells.key == parameter.key and name not in found:
                full = self._initial.get(name)
                part = values if full is None or full.is_meta else full.reshape(-1)[begin:end]
                found[name] = part.to(tensor.dtype, copy=True).view(tuple(shape))
        return found

    def forget_initial(self) -> None:
        """Let go of the values of whole parameters."""
        self._initial.clear()

    # ---- small states

    def marked(self, others: State) -> State:
        """Return the objects' states with marks for what is in cells."""
        names = self.names()

        def mark(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, CellValue):
                return leaf
            value: Any = leaf
            dtype = str(value.dtype).removeprefix("torch.")
            return {IN_CELLS: names[id(leaf._cells)], "parameter": leaf._phalanx_name, "dtype": dtype}

        found: State = with_leaves(others, mark)
        return found

    def filled(self, others: State, make: Callable[[str, torch.dtype, tuple[int, ...]], Any]) -> State:
        """Return marked states with something in the place of each mark, the same for marks of one value."""
        made: dict[str, Any] = {}

        def fill(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Mapping):
                return leaf
            name = leaf[IN_CELLS]
            if name not in made:
                made[name] = make(name, dtype_from_name(leaf["dtype"]), self._names[leaf["parameter"]].shape)
            return made[name]

        found: State = with_leaves(others, fill)
        return found

    def with_live(self, others: State) -> State:
        """Return states with this worker's cells in the place of marks and of a save's tensors that belong to cells."""
        self.convert()
        live = self._live()
        wanted = self._parameters_of(others)
        made: dict[Any, Any] = {}

        def put(path: Path, leaf: Any) -> Any:
            if path not in wanted and not isinstance(leaf, Mapping):
                return leaf
            if path in live:
                return live[path]
            is_mark = isinstance(leaf, Mapping)
            same = leaf[IN_CELLS] if is_mark else id(leaf)
            if same not in made:
                parameter = self._names[leaf["parameter"]] if is_mark else wanted[path]
                dtype = dtype_from_name(leaf["dtype"]) if is_mark else leaf.dtype
                like = torch.empty(parameter.shape, dtype=dtype, device="meta")
                made[same] = self._make(parameter, like, CellTensor)
            return made[same]

        found: State = with_leaves(others, put)
        return found

    def with_small(self, others: State, names: Collection[str], read: Callable[[str], Tensor]) -> State:
        """Return a save's states with the values of those tensors that do not belong to cells; it has these names."""
        wanted, known = self._parameters_of(others), _names_in(others, names)

        def put(path: Path, leaf: Any) -> Any:
            is_wanted = isinstance(leaf, Tensor) and leaf.is_meta and path not in wanted
            return read(known[id(leaf)]) if is_wanted else leaf

        found: State = with_leaves(others, put)
        return found

    def in_save(self, others: State, names: Collection[str]) -> dict[str, ModelParameter]:
        """Return by name which tensors of a save's objects belong to cells; ``names`` are those of all its tensors."""
        tree, known = dict(leaves(others)), _names_in(others, names)
        return {known[id(tree[path])]: parameter for path, parameter in self._parameters_of(others).items()}


def _names_in(others: State, names: Collection[str]) -> dict[int, str]:
    """Return by ``id`` what a save calls its tensors: one that stands in several places has the name of one of them."""
    return {
        id(leaf): name_of(path) for path, leaf in leaves(others) if isinstance(leaf, Tensor) and name_of(path) in names
    }


def _kind(tensor: Tensor, *, is_in_module: bool) -> type[CellValue]:
    if is_in_module:
        return ShardedParameter
    return FormerShard if isinstance(tensor, DTensor) else CellTensor


def _full(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = value._local if value.device_mesh.size() == 1 else value.full_tensor()
    return value.clone(memory_format=torch.contiguous_format)


def _places(module: nn.Module, name: str) -> dict[Path, tuple[nn.Module, str]]:
    """Return where the parameters of a module are, by their places in its state dict."""
    return {
        (name, f"{prefix}.{key}" if prefix else key): (inner, key)
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for key in module_parameters(inner)
    }


def _at(tree: Any, path: Path) -> Any:
    return dict(leaves(tree)).get(path)
