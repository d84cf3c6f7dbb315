"""Arguments of a torch call: the DTensors in them, a key for the cache, plain tensors, 0-d tensors that are numbers.

Owns ``flatten`` (call -> ``Structure``), ``promote`` and ``with_numbers``. Plain tensors beside DTensors are an error
unless they are 0-d or the user allowed implicit replicas; a tensor on a sub-mesh beside one on its root counts as
replicated on the other axes.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from numbers import Number
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import rnn

from phalanx._torch_private import (
    apply_permutation,
    detect_is_causal_mask,
    is_functorch_wrapped_tensor,
    schema_of,
)
from phalanx.comm import DeviceMesh
from phalanx.tensor.core._copied_views import check_up_to_date, checked_local
from phalanx.tensor.core._dtensor import DTensor, above, number_of, wrap
from phalanx.tensor.core._implicit_communication import moved_for
from phalanx.tensor.core._modes import calling_code, settings, user_line
from phalanx.tensor.core._tracing import handlers
from phalanx.tensor.layout._placement import REPLICATE
from phalanx.tensor.layout._spec import Spec, axes_in, on_root
from phalanx.tensor.ops._registry import OPERATORS, OpName, op_name
from phalanx.tensor.ops._rule import torch_keywords

# Rules never depend on a float's value, except on whether it is one of these: the key of a decision leaves others
# out, or every step size of an optimizer would be a new decision.
KEPT_FLOATS = frozenset({0.0, 1.0, math.inf, -math.inf})
# Rules for functions that go element by element do not depend on whole numbers either. These few have an entry of their
# own all the same, which is found sooner.
KEPT_INTS = frozenset(range(-16, 17))


class NeedsPromotion(Exception):  # a signal inside this package, not an error
    """The arguments hold plain tensors, or DTensors on several meshes."""


class _Slot:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Structure:
    """The arguments of one call with numbered slots for DTensors."""

    __slots__ = ("args", "key", "kwargs", "tensors")

    def __init__(self) -> None:
        self.args: Any = ()
        self.kwargs: Any = {}
        self.tensors: list[DTensor] = []
        self.key: list[Any] | None = []  # None: the arguments cannot be hashed

    def rebuild(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``values`` in the slots."""
        return _fill(self.args, values), _fill(self.kwargs, values)


def _fill(node: Any, values: Sequence[Any]) -> Any:
    kind = type(node)
    if kind is _Slot:
        return values[node.index]
    if kind is tuple or kind is list:
        return kind(_fill(item, values) for item in node)
    if kind is dict:
        return {key: _fill(item, values) for key, item in node.items()}
    return node


def flatten(args: Any, kwargs: Any) -> Structure:
    """Find the DTensors. Raises ``NeedsPromotion`` if there is a plain tensor, or if the meshes differ."""
    structure = Structure()
    structure.args = _walk(tuple(args), structure)
    structure.kwargs = _walk(dict(kwargs), structure)
    tensors = structure.tensors
    if tensors:
        mesh = tensors[0]._spec.mesh
        if any(t._spec.mesh is not mesh and t._spec.mesh != mesh for t in tensors):
            raise NeedsPromotion
    return structure


def _walk(node: Any, structure: Structure) -> Any:
    key = structure.key
    if type(node) is DTensor:
        if node._copied_view is not None:
            check_up_to_date(node)
        structure.tensors.append(node)
        if key is not None:
            key.append(node._spec)
        return _Slot(len(structure.tensors) - 1)
    if isinstance(node, Tensor):
        raise NeedsPromotion
    if isinstance(node, (list, tuple)):
        if key is not None:
            key.append((type(node).__name__, len(node)))
        items = [_walk(item, structure) for item in node]
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, dict):
        if key is not None:
            key.append(("dict", tuple(node)))
        return {name: _walk(item, structure) for name, item in node.items()}
    if isinstance(node, slice):
        if any(isinstance(part, Tensor) for part in (node.start, node.stop, node.step)):
            node = slice(*(None if p is None else int(p) for p in (node.start, node.stop, node.step)))
        if key is not None:
            key.append(("slice", node.start, node.stop, node.step))
        return node
    if type(node) is float and node not in KEPT_FLOATS:
        if key is not None:
            key.append(float)
        return node
    if key is not None:
        try:
            hash(node)
            key.append((type(node), node))
        except TypeError:
            structure.key = None
    return node


def key_of_any_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key for these arguments that leaves out the values of numbers, except for what sums depend on: zero,
    infinity.

    None if there are no numbers but such as have an entry of their own, or if some argument is not a plain value.
    """
    key: list[Any] = [*kwargs]
    left_out = False
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is DTensor:
            key.append(value._spec)
        elif kind is int:
            key.append((int, value == 0))
            left_out = left_out or value not in KEPT_INTS
        elif kind in _VALUES:
            key.append((kind, value))
        elif isinstance(value, Number):  # a float, complex, or numpy's
            told: Any = value  # its type is
            key.append((kind, told if told in KEPT_FLOATS or cmath.isinf(told) else None))
            left_out = left_out or kind is not float
        else:
            return None
    return tuple(key) if left_out else None


_VALUES = frozenset({bool, str, type(None), torch.dtype, torch.device, torch.memory_format})


def walk_tensors(node: Any, visit: Callable[[Tensor], Any]) -> Any:
    """``node`` with every tensor in nested lists, tuples and dicts replaced by ``visit`` of it."""
    if isinstance(node, Tensor):
        return visit(node)
    if isinstance(node, (list, tuple)):
        items = [walk_tensors(item, visit) for item in node]
        if hasattr(node, "_fields"):
            return type(node)(*items)
        if type(node).__module__ == "torch.return_types":
            return type(node)(items)
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, dict):
        return {name: walk_tensors(item, visit) for name, item in node.items()}
    return node


def run_handler(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on arguments that take the place of the caller's: by its handler, so that torch does not ask anew.

    Where no DTensor is left among them it is torch's own.
    """
    found: list[Tensor] = []
    walk_tensors((args, kwargs), found.append)
    if not any(isinstance(tensor, DTensor) for tensor in found):
        return func(*args, **kwargs)
    return (handlers.get(func) or above.find_handler(func))(func, tuple(args), kwargs)


def promote(name: OpName, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with every tensor a DTensor on one mesh, or an error that names the odd one out.

    A plain tensor that is written to takes 0-d DTensors as numbers (gradients are clipped so): it stays plain.
    """
    op = name.base
    found: list[Tensor] = []
    walk_tensors((args, kwargs), found.append)
    distributed = [t for t in found if isinstance(t, DTensor)]
    if (
        name.in_place
        and not isinstance(found[0], DTensor)
        and not any(t.ndim for t in distributed)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in found))
    ):
        number = partial(_as_number, op)
        return walk_tensors((tuple(args), dict(kwargs)), number)  # type: ignore[no-any-return]  # as they were
    mesh = _common_mesh(op, distributed)

    def lift(tensor: Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor if tensor._spec.mesh == mesh else _on_root(tensor, mesh)
        if is_functorch_wrapped_tensor(tensor):
            raise NotImplementedError(
                f"{op} inside torch.func or torch.vmap got a DTensor, at {user_line()}: that is not distributed. Use "
                f"torch.autograd.grad and torch.autograd.functional, or d.full_tensor() outside of the function"
            )
        if tensor.dim() and not (settings.implicit_replication or _is_harmless(op, tensor) or _is_of_torch()):
            position = next(i for i, other in enumerate(found) if other is tensor)
            raise RuntimeError(
                f"{op} got a plain tensor of shape {tuple(tensor.shape)} (tensor argument {position}) beside a "
                f"DTensor, at {user_line()}; distribute it, or allow it with implicit_replication()"
            )
        return wrap(tensor, Spec.of(mesh, (REPLICATE,) * mesh.ndim, tensor.shape, tensor.dtype))

    return walk_tensors(tuple(args), lift), walk_tensors(dict(kwargs), lift)


def _as_number(op: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return moved_for(op, checked_local(tensor), tensor._spec, tensor._spec.replicated)


def _is_harmless(op: str, tensor: Tensor) -> bool:
    """Return whether modules make such a tensor themselves: an initial state of zeros, the offsets of bags."""
    made = OPERATORS[op].module_makes
    if made == "states":
        return not bool(tensor.any())
    return made == "offsets" and tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 1


_MAKE_PLAIN = frozenset(
    function.__code__
    for function in (rnn.pack_padded_sequence, rnn.pad_packed_sequence, apply_permutation, detect_is_causal_mask)
)


def _is_of_torch() -> bool:
    """Return whether a function of torch calls that makes plain tensors of lengths, or of the shape of a mask.

    Lengths of sequences are numbers, the same on every rank; so are the permutations that sort them.
    """
    return calling_code() in _MAKE_PLAIN


def _common_mesh(op: str, tensors: list[DTensor]) -> DeviceMesh:
    meshes = list({t._spec.mesh: None for t in tensors})
    if len(meshes) == 1:
        return meshes[0]
    for root in meshes:
        if all(mesh == root or axes_in(mesh, root) is not None for mesh in meshes):
            return root
    raise ValueError(
        f"{op} got DTensors on meshes that are not parts of one another: {meshes} (at {user_line()}); "
        f"put them on one mesh first"
    )


def _on_root(tensor: DTensor, root: DeviceMesh) -> DTensor:
    spec = on_root(tensor._spec, root)
    assert spec is not None, "the common mesh contains every other"
    lifted = wrap(tensor._local, spec)
    if tensor._copied_view is not None:
        lifted._copied_view = tensor._copied_view.read_only()
    return lifted


# ---- 0-d tensors where torch takes a number: ``x[i]``, ``x.repeat(n, 1)``, ``torch.add(x, y, alpha=a)``
#
# Of such a tensor torch takes the value, which may decide about the shape of the result or about which rank holds it:
# the value is read on every rank before anything is laid out. Where torch also takes a tensor in that place (``x + t``,
# ``x.clamp(t)``), it stays one.

_POSITIONS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})  # bool and uint8 are masks


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Read = Callable[[str, Tensor], Any]


def with_numbers(func: Any, args: Any, kwargs: Any) -> _Arguments | None:
    """Return the arguments with numbers in place of 0-d tensors that stand for them; None if there are none."""
    return _replaced(func, args, kwargs, number_of)


def is_general(func: Any, args: Any, kwargs: Any, tensors: Sequence[DTensor]) -> bool:
    """Return whether the DTensors of a call are on several meshes, or some stand for numbers; reads none of those."""
    mesh = tensors[0]._spec.mesh
    if any(tensor._spec.mesh is not mesh for tensor in tensors):
        return True
    return _replaced(func, args, kwargs, lambda op, tensor: None) is not None


def _replaced(func: Any, args: Any, kwargs: Any, read: _Read) -> _Arguments | None:
    name = op_name(func).base
    if OPERATORS[name].indexes:
        key = _plain_key(name, args[1], read)
        return None if key is args[1] else ((args[0], key, *args[2:]), kwargs)
    places = _tensor_places(name)
    if places is None:
        return None
    by_place = [a if i in places else _with_values(name, a, read) for i, a in enumerate(args)]
    named = torch_keywords(kwargs) if kwargs else kwargs
    by_name = {k: v if k in places else _with_values(name, v, read) for k, v in named.items()}
    same = all(map(is_, by_place, args)) and all(by_name[k] is named[k] for k in named)
    return None if same else (tuple(by_place), by_name)


def _plain_key(name: str, key: Any, read: _Read) -> Any:
    if isinstance(key, Tensor):
        return read(name, key) if not key.dim() and key.dtype in _POSITIONS else key
    if type(key) is not tuple or not any(isinstance(k, Tensor) and not k.dim() for k in key):
        return key
    keys = tuple(_plain_key(name, k, read) if isinstance(k, Tensor) else k for k in key)
    return key if all(map(is_, keys, key)) else keys


def _with_values(name: str, value: Any, read: _Read) -> Any:
    if isinstance(value, Tensor):
        return value if value.dim() or value.dtype is torch.bool else read(name, value)
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) and not v.dim() for v in value):
        return type(value)(_with_values(name, v, read) for v in value)
    return value


@cache
def _tensor_places(base: str) -> frozenset[int | str] | None:
    """Positions and names at which some signature of an operation of torch takes a tensor; None: not known."""
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return None
    places: set[int | str] = set()
    for overload in packet.overloads():
        for place, argument in enumerate(schema_of(getattr(packet, overload)).arguments):
            if "Tensor" in str(argument.type):
                places |= {place, "input" if argument.name == "self" else argument.name}
    return frozenset(places)
