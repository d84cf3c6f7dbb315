"""DTensors whose data is still on its way: what ``redistribute(async_op=True)`` returns.

Owns ``pending``. Its result tells shape, dtype, placements and mesh at once; the first look at its data waits for the
collective and turns the object into an ordinary DTensor, so that ordinary ones pay nothing for the possibility.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.dispatch._arguments import walk_tensors
from phalanx.tensor.layout._spec import Spec


class _Pending(DTensor):
    """A DTensor with no ``_local`` yet. Becomes a ``DTensor`` when asked for it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name != "_local" or "_complete" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        local = self.__dict__.pop("_complete")()
        self.__class__ = DTensor  # type: ignore[assignment]  # the same slots; from here on it is one
        self._local = local
        return local

    def __reduce_ex__(self, protocol: Any) -> Any:
        _look(self)
        return DTensor.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        _look(self)
        return DTensor.__deepcopy__(self, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        walk_tensors((args, kwargs or {}), _look)
        return DTensor.__torch_function__(func, types, args, kwargs)


def _look(tensor: Tensor) -> None:
    if isinstance(tensor, _Pending):
        tensor._local  # noqa: B018  # looking is what completes it


def pending(spec: Spec, complete: Callable[[], Tensor]) -> DTensor:
    """A DTensor laid out as ``spec`` whose local tensor is ``complete()``, called when first needed."""
    result = torch.Tensor._make_subclass(_Pending, spec.template)
    result._spec = spec
    result._copied_view = None
    result.__dict__["_complete"] = complete
    return result
