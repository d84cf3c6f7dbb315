"""CellTensor: a value that is laid out like a parameter of a sharded job, of which this worker has the cells it holds.

Owns what stands in modules for parameters between their uses (``ShardedParameter``) and in the user's objects for
averages of them. It has the parameter's shape and dtype, and the ranges of it that are here (``LocalCells``).
Operations that treat every element alike run on those ranges, on every holder alike, so ``ema.lerp_(parameter, 0.1)``
works and has the bits of the same on whole tensors. Everything else (sums, views, random numbers) would silently be
about a part of the value, and is an error that says where all of it is to be had.

Invariant: an alias (``detach``) shares its ``LocalCells`` with the original; when cells move, both follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx._torch_private import make_wrapper_subclass, schema_of
from phalanx.fsdp.layout._unit_layout import Range
from phalanx.tensor import DTensor

Key = tuple[int, int, int]
"""Unit, section of it, parameter of that."""

_NO_HOOKS = (
    "a hook on the gradient of parameter {0!r} of a sharded job: a gradient is summed over all slots at the workers "
    "that hold its cells, and is there when step.reduce() has returned, in job.optimizer.param_groups"
)
_ALIASES = ("detach", "alias")
_ALIKE = ("copy_", "zero_", "fill_", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like")
"""Operations that treat all elements alike and are not tagged so."""
_NOT_ALIKE = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


@dataclass(eq=False)
class LocalCells:
    """What this worker has of one value that is laid out like a parameter."""

    key: Key
    first: int
    """Where the parameter begins in its section."""
    parts: dict[Range, Tensor] = field(default_factory=dict)
    """By the range of the section: one for each piece of the parameter."""
    is_cut: bool = False
    """Whether the section has a tensor parallel shard of the value: elements are counted in that."""


class CellValue:
    """What all tensors in cells have in common; ``isinstance`` with it tells them from others."""

    __slots__ = ()

    _phalanx_name: str
    _cells: LocalCells
    _local: Tensor

    @classmethod
    def make(cls, like: Tensor, name: str, cells: LocalCells, dtype: torch.dtype | None = None) -> Any:
        """Return a value with the shape of ``like``; ``name`` is the parameter's."""
        made: Any = make_wrapper_subclass(
            cls,
            like.shape,
            dtype=dtype or like.dtype,
            device=like.device if not like.is_meta else torch.device("cpu"),
            requires_grad=like.requires_grad and issubclass(cls, ShardedParameter),
        )
        made._phalanx_name, made._cells = name, cells
        made._local = torch.empty(0)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        value: Any = self
        return f"{type(self).__name__}({self._phalanx_name!r}, shape={tuple(value.shape)}, dtype={value.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in _ALIASES:
            return CellTensor.make(args[0], args[0]._phalanx_name, args[0]._cells)
        if name.startswith("_foreach_") and name not in _NOT_ALIKE:
            return _for_each(func, args, kwargs)
        if torch.Tag.pointwise in func.tags or name in _ALIKE:
            return _by_parts(func, args, kwargs)
        raise _not_here(func, args)


class CellTensor(CellValue, Tensor):  # type: ignore[misc]  # torch declares __torch_dispatch__ as a function
    """Shape and dtype of a parameter, and this worker's ranges of some value for it."""


class FormerShard(CellValue, Tensor):  # type: ignore[misc]  # as above
    """What a ``DTensor`` in a user's object becomes: one Python object can be the one and then the other."""

    __slots__ = DTensor.__slots__


class ShardedParameter(CellTensor):
    """What stands in a module for a parameter between uses; ``isinstance`` takes it for an ``nn.Parameter``."""

    _is_param = True

    @staticmethod
    def like(parameter: Tensor, name: str, cells: LocalCells) -> ShardedParameter:
        """Return what stands for ``parameter``."""
        made: ShardedParameter = ShardedParameter.make(parameter, name, cells)
        made.__dict__.update({key: value for key, value in parameter.__dict__.items() if not key.startswith("_")})
        return made

    def register_hook(self, hook: Any) -> Any:
        """Refuse: whole gradients of a parameter exist on no worker."""
        raise RuntimeError(_NO_HOOKS.format(self._phalanx_name))

    register_post_accumulate_grad_hook = register_hook


def _for_each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists of tensors, for one place of the lists after the other."""

    def at(value: Any, number: int) -> Any:
        return list(value[number : number + 1]) if isinstance(value, (list, tuple)) else value

    found = [
        _by_parts(func, [at(each, number) for each in args], {key: at(each, number) for key, each in kwargs.items()})
        for number in range(len(args[0]))
    ]
    return None if schema_of(func).is_mutable else [each[0] for each in found]


def _by_parts(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on each range that is here."""
    cells = _cell_tensors([*args, *kwargs.values()])
    first: Any = cells[0]
    for other in cells[1:]:
        if other._cells.key != first._cells.key or other._cells.parts.keys() != first._cells.parts.keys():
            raise RuntimeError(
                f"{func.__name__} of {first} and {other}: these are no cells of the same elements. Values of one "
                "parameter go together, and those that are kept beyond a step belong into Job(state=...)"
            )
    is_mutable = schema_of(func).is_mutable
    if is_mutable and not _cell_tensors(args[:1]):
        raise _not_here(func, args)  # it would be written in part
    out: dict[Range | None, Any] = {}
    for where in (*first._cells.parts, None):  # None: no element, to know what comes out
        out[where] = func(
            *[_operand(each, first, where, func) for each in args],
            **{key: _operand(each, first, where, func) for key, each in kwargs.items()},
        )
    return args[0] if is_mutable else _wrapped(out, first)


def _wrapped(out: dict[Range | None, Any], first: Any) -> Any:
    if isinstance(out[None], (list, tuple)):
        return [_wrapped({one: each[n] for one, each in out.items()}, first) for n in range(len(out[None]))]
    parts = {one: each for one, each in out.items() if one is not None}
    return CellTensor.make(
        first,
        first._phalanx_name,
        LocalCells(first._cells.key, first._cells.first, parts, first._cells.is_cut),
        out[None].dtype,
    )


def _operand(value: Any, first: Any, where: Range | None, func: Any) -> Any:
    """Return what an operand is at one range."""
    if isinstance(value, (list, tuple)):
        return [_operand(each, first, where, func) for each in value]
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, CellValue):
        return value._cells.parts[where] if where is not None else torch.empty(0, dtype=value.dtype)
    if not value.dim():
        return value
    if value.shape != first.shape:
        raise RuntimeError(
            f"{func.__name__} of {first} and a tensor of shape {tuple(value.shape)}: expected the parameter's shape "
            "or a number"
        )
    if first._cells.is_cut:
        raise RuntimeError(
            f"{func.__name__} of {first} and a whole tensor: this worker has cells of a tensor parallel shard of it, "
            "and can combine it with numbers and with values that are laid out alike"
        )
    if where is None:
        return value.new_empty(0)
    begin, end = (at - first._cells.first for at in where)
    return value.reshape(-1)[begin:end].view(first._cells.parts[where].shape)


def _cell_tensors(values: Sequence[Any]) -> list[CellValue]:
    found: list[CellValue] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _cell_tensors(value)
        elif isinstance(value, CellValue):
            found.append(value)
    return found


def _not_here(func: Any, args: Sequence[Any]) -> RuntimeError:
    name = next((one._phalanx_name for one in _cell_tensors(args)), "?")
    return RuntimeError(
        f"{getattr(func, '__name__', func)} of parameter {name!r} outside of forward and backward: this worker has "
        "only some cells of it, and can do what treats every element alike. job.full_state_dict() gives all values, on "
        "all workers' request; job.optimizer.param_groups have this worker's pieces"
    )
