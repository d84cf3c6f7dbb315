"""Released parameters: what a whole parameter is while its unit's memory is gone, for those who kept it aside.

Owns ``close`` and ``reopen``, which change the class of a parameter that users may hold. Its memory is not there, so a
computation with it would read nothing, or end the process; with this class it is an error with the unit's name.
Metadata and ``grad`` stay readable. Autograd does not look at classes: what it saved is used when it is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

_NAME = "_phalanx_released"
_classes: dict[type, type] = {}
_SHAPE = frozenset(("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point"))


class _ReleasedParameter:
    """Mixed in front of a tensor's class."""

    _phalanx_function: Any
    """What that class does with torch functions."""
    _phalanx_kind: type

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__") or name in _SHAPE:
            return cls._phalanx_function(func, types, args, kwargs)
        raise RuntimeError(_refusal(name, [*args, *kwargs.values()]))


def close(tensor: Tensor, unit: str, name: str, rank: int) -> None:
    """Make computations with ``tensor`` an error that says which parameter it is."""
    if isinstance(tensor, _ReleasedParameter):
        return
    kind = type(tensor)
    released = _classes.get(kind)
    if released is None:
        own: Any = (nn.Parameter if kind is Tensor else kind).__torch_function__  # without wrapping what it returns
        members = {"_phalanx_kind": kind, "_phalanx_function": staticmethod(own)}
        released = _classes[kind] = type(kind.__name__, (_ReleasedParameter, kind), members)
    tensor.__dict__[_NAME] = (unit, name, rank)
    tensor.__class__ = released


def reopen(tensor: Tensor) -> None:
    """Undo ``close``."""
    if isinstance(tensor, _ReleasedParameter):
        tensor.__class__ = tensor._phalanx_kind


def _refusal(operation: str, given: Sequence[Any]) -> str:
    found = next((value for value in _flattened(given) if isinstance(value, _ReleasedParameter)), None)
    unit, name, rank = ("its unit", "", 0) if found is None else found.__dict__[_NAME]
    return (
        f"rank {rank}: {operation} of parameter {name!r} of {unit}, which was kept aside while it was gathered and has "
        f"no memory now. Take it from the module where it is used, or put unshard() and reshard() around that code"
    )


def _flattened(given: Sequence[Any]) -> list[Any]:
    return [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]
