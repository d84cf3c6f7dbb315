"""Memory order of what moves and operations make: that of the global tensor on one device.

Owns ``kept_order``, for inputs that were moved, and ``OrderedCall``, for results of which a rank holds a single row.
torch makes results in the order of their inputs, but collectives make row-major ones, and a dim of which a shard has
one row has a place in the order that no kernel looks at: its stride is free, and says here where the global tensor has
that dim. What later copies, and what is a view, follows from the order (``_strides.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._without_modes import without_user_modes
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.core._strides import global_strides, strides_of
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._rule import CANNOT_TELL, Call, In, Sharding, tensors_in

Strides = tuple[int, ...]


def kept_order(moved: Tensor, target: Spec, tensor: DTensor) -> Tensor:
    """``moved``, the local of ``tensor`` laid out as ``target``, with the memory order that ``tensor`` has."""
    if tensor._copied_view is None and tensor._local.stride() == tensor._spec.local_strides:
        return moved  # row-major, as what is moved is
    spec, strides = target.with_dtype(moved.dtype), strides_of(tensor)
    wanted: Strides | None = spec.variants.get(("order", strides))
    if wanted is None:
        of_global = strides
        if 0 in strides:  # expanded, which the copy is not
            with without_user_modes():
                of_global = torch.empty_like(torch.empty_strided(spec.shape, strides, device="meta")).stride()
        wanted = spec.variants["order", strides] = shard_strides(spec, of_global)
    if moved.stride() == wanted or say_order(moved, wanted):
        return moved
    return copied_in_order(moved, wanted)


def copied_in_order(local: Tensor, wanted: Strides) -> Tensor:
    """Return a copy of ``local`` with these strides; differentiable."""
    return torch.empty_strided(local.shape, wanted, dtype=local.dtype, device=local.device).copy_(local)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of a tensor from the innermost in memory to the outermost; of an expanded one, of its copy.

    >>> memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (1, 3, 2, 0)
    """
    with without_user_modes():
        strides = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (strides[d], tensor.shape[d] > 1, -d)))


def packed_in(order: Sequence[int], shape: Sequence[int]) -> Strides:
    """Return the strides without gaps of a tensor whose dims lie in memory by ``order``, the innermost first."""
    strides, extent = [0] * len(shape), 1
    for dim in order:
        strides[dim] = extent
        extent *= max(1, shape[dim])
    return tuple(strides)


_MOST_DIMS = 15  # whose order fits into a number that can be sent; of tensors with more it is row-major


def order_number(order: Sequence[int]) -> int:
    return sum(dim << 4 * place for place, dim in enumerate(order)) if len(order) <= _MOST_DIMS else 0


def order_of_number(number: int, num_dims: int) -> tuple[int, ...]:
    """
    >>> order_of_number(order_number((1, 3, 2, 0)), 4)
    (1, 3, 2, 0)
    """
    if num_dims > _MOST_DIMS:
        return tuple(reversed(range(num_dims)))
    return tuple(number >> 4 * place & 15 for place in range(num_dims))


def shard_strides(spec: Spec, strides: Sequence[int]) -> Strides:
    """Return the strides of this rank's shard, without gaps, of a global tensor that has ``strides``."""
    return packed(spec.local_shape, spec.shape, strides)


def packed(sizes: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Strides without gaps for ``sizes``, in the order of a tensor that has ``shape`` and ``strides``."""
    of_local, extent = [0] * len(strides), 1
    for dim in sorted(range(len(strides)), key=lambda d: (strides[d], shape[d] > 1, -d)):
        if strides[dim] or shape[dim] == 1:  # not expanded
            of_local[dim] = extent
            extent *= max(1, sizes[dim])
    return tuple(of_local)


def say_order(local: Tensor, wanted: Strides) -> bool:
    """Give ``local`` the strides ``wanted`` where they are free; False if the others are not as wanted.

    Neither autograd nor the version takes notice: the elements are where they were.
    """
    if not _fits(local, wanted):
        return False
    local.data = local.data.as_strided(local.shape, wanted)
    return True


def _fits(local: Tensor, wanted: Strides) -> bool:
    """Return whether ``local`` has the strides ``wanted`` wherever its elements depend on them."""
    if not local.numel():
        return True
    return all(a == b for a, b, size in zip(local.stride(), wanted, local.shape, strict=True) if size > 1)


class OrderedCall:
    """A local call whose results have the order in memory that the global results would have.

    It is asked for once for each order of the inputs, by small tensors or by meta tensors.
    """

    __slots__ = (
        "_call", "_elementwise", "_is_nested", "_is_plain", "_is_view", "_known", "_outputs", "_positions",
        "_run", "_targets",
    )  # fmt: skip

    def __init__(
        self,
        run: Callable[..., Any],
        call: Call,
        targets: Sequence[Spec],
        outputs: Sequence[Spec],
        sharding: Sharding,
    ) -> None:
        self._run = run
        self._elementwise = sharding.elementwise
        self._is_view = sharding.is_view
        self._is_plain = run is call.func  # torch's function itself
        self._call = call
        self._targets = targets
        self._outputs = outputs
        self._positions = [i for i, arg in enumerate(call.args) if type(arg) is In]
        self._is_nested = len(self._positions) != len(targets)  # in lists, or among keywords
        self._known: dict[tuple[Strides, ...], list[Strides] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self._is_nested:
            given: list[Strides] = []
            _collect_strides(self._call.args, args, given)
            _collect_strides(tuple(self._call.kwargs.values()), tuple(kwargs.values()), given)
            key = tuple(given)
        else:
            key = tuple([args[i].stride() for i in self._positions])
        result = self._run(*args, **kwargs)
        try:
            wanted = self._known[key]
        except KeyError:
            with without_user_modes():
                wanted = self._known[key] = self._ask(key, tensors_in(result))
        if wanted is None:
            return result
        if isinstance(result, Tensor):
            return result if args and result is args[0] else self._in_order(result, wanted[0])
        for local, strides in zip(tensors_in(result), wanted, strict=True):
            if local.stride() != strides:
                say_order(local, strides)
        return result

    def _in_order(self, local: Tensor, wanted: Strides) -> Tensor:
        if local.stride() == wanted or say_order(local, wanted):
            return local
        return local if self._is_view or 0 in wanted else copied_in_order(local, wanted)

    def _ask(self, local_strides: Sequence[Strides], results: Sequence[Tensor]) -> list[Strides] | None:
        """Strides of the results' shards; None if nothing can tell them."""
        of_global = [
            global_strides(spec, of_local) for spec, of_local in zip(self._targets, local_strides, strict=True)
        ]
        found = None
        try:
            if self._elementwise:
                found = self._in_small(of_global)
            elif not self._is_plain or self._foretells(local_strides, results):
                found = self._on_meta([spec.shape for spec in self._targets], of_global)
        except CANNOT_TELL:
            pass
        if found is None:
            return None
        return [
            telling_strides(spec, strides, result.stride())
            for spec, strides, result in zip(self._outputs, found, results, strict=True)
        ]

    def _in_small(self, of_global: Sequence[Strides]) -> list[Strides]:
        """By the function itself, of tensors with at most two rows in each dim: it works by elements.

        Meta tensors would give some functions another order.
        """
        small = []
        for spec, strides in zip(self._targets, of_global, strict=True):
            sizes = [min(2, size) for size in spec.shape]
            ones = torch.ones(2 ** len(sizes), dtype=spec.dtype, device=spec.mesh.device_type)
            small.append(ones.as_strided(sizes, packed(sizes, spec.shape, strides)))
        made = tensors_in(self._call.on(small))
        return [_scaled(t, spec) for t, spec in zip(made, self._outputs, strict=True)]

    def _foretells(self, local_strides: Sequence[Strides], results: Sequence[Tensor]) -> bool:
        """Return whether meta tensors give what the shards gave: some functions have an order of their own on them."""
        found = self._on_meta([spec.local_shape for spec in self._targets], local_strides)
        return all(
            result.stride() == strides or not result.numel() for result, strides in zip(results, found, strict=True)
        )

    def _on_meta(self, shapes: Any, strides: Sequence[Strides]) -> list[Strides]:
        given = [
            torch.empty_strided(shape, one, dtype=spec.dtype, device="meta")
            for shape, one, spec in zip(shapes, strides, self._targets, strict=True)
        ]
        return [t.stride() for t in tensors_in(self._call.on(given))]


def _scaled(small: Tensor, spec: Spec) -> Strides:
    """Strides without gaps of a tensor as large as ``spec`` in the order of ``small``."""
    return packed(spec.shape, spec.shape, small.stride())


def telling_strides(spec: Spec, of_global: Strides, of_local: Strides) -> Strides:
    """``of_local``, if that tells that the global tensor has the strides ``of_global``, or else strides that do."""
    found = global_strides(spec, of_local)
    if all(a == b for a, b, size in zip(found, of_global, spec.shape, strict=True) if size != 1):
        return of_local
    return shard_strides(spec, of_global)


def _collect_strides(pattern: Any, values: Any, found: list[Strides]) -> None:
    for one, value in zip(pattern, values, strict=True):
        if type(one) is In:
            found.append(value.stride())
        elif type(one) is list or type(one) is tuple:
            _collect_strides(one, value, found)
