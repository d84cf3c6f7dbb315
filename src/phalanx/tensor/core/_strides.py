"""Strides of a global tensor, and what torch's functions make of them: the tensor itself, a view of it, or a copy.

Owns ``global_strides`` and ``Aliasing``. No rank has it, but the order and the gaps of its memory follow from this
rank's shard. They decide whether ``reshape`` and ``contiguous`` copy, and the local tensors must do as the global one
would: a shard with one row is contiguous in more ways than the global one is.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._torch_private import is_alias_of
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.ops._rule import Call, tensors_in

SELF, VIEW, COPY = "self", "view", "copy"


def global_strides(spec: Spec, local: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that the global tensor has if this rank's shard, laid out as ``spec``, has ``local``.

    Of two equal strides the dim of size one is the inner one: as the outer one it would have a larger stride.
    """
    sizes, strides = spec.local_shape, [0] * len(local)
    if sizes == spec.shape:
        return tuple(local)
    local_extent = extent = 1
    for dim in sorted(range(len(local)), key=lambda d: (local[d], max(1, sizes[d]), -d)):
        if local[dim] == 0:
            continue  # expanded
        # no gap: it begins where the dims inside of it end
        strides[dim] = extent if local[dim] <= local_extent else -(-extent * local[dim] // local_extent)
        if spec.shape[dim] != 1:
            local_extent = local[dim] * max(1, sizes[dim])
            extent = strides[dim] * max(1, spec.shape[dim])
    return tuple(strides)


def known_strides(tensor: DTensor) -> tuple[int, ...] | None:
    """``strides_of`` where every rank finds the same, else None: whether to raise may follow from nothing else."""
    if tensor._copied_view is not None:
        return tensor._copied_view.strides  # type: ignore[no-any-return]  # a tuple of ints, or None
    return None if tensor._spec.has_thin_shard else strides_of(tensor)


def strides_of(tensor: DTensor) -> tuple[int, ...]:
    """Strides of the global tensor; of a copied view those that the view would have had."""
    mark = tensor._copied_view
    if mark is not None and mark.strides is not None:
        return mark.strides  # type: ignore[no-any-return]  # a tuple of ints
    return global_strides(tensor._spec, tensor._local.stride())


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether these strides leave no gaps and keep the order of the dims."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Aliasing:
    """What torch would return for one call on a global tensor, by the strides that it has."""

    __slots__ = ("_call", "_known")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._known: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}

    def of(self, tensor: DTensor) -> tuple[str, tuple[int, ...]]:
        """``SELF``, ``VIEW`` or ``COPY``, and the strides of the (first) result."""
        if tensor._copied_view is not None:
            return self._asked(strides_of(tensor))
        strides = tensor._local.stride()
        found = self._known.get(strides)
        if found is None:
            found = self._known[strides] = self._asked(global_strides(tensor._spec, strides))
        return found

    def _asked(self, strides: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        of_global, result = self._call.meta_with(strides)
        if result is of_global:
            return SELF, strides
        shared = is_alias_of(result, of_global)
        return VIEW if shared else COPY, result.stride()

    def view_strides(self, tensor: DTensor, count: int) -> Sequence[tuple[int, ...] | None]:
        """Strides of each of the ``count`` views that the call makes of ``tensor``; None if not known."""
        strides = known_strides(tensor)
        if strides is None:
            return (None,) * count
        return [t.stride() for t in tensors_in(self._call.meta_with(strides)[1])]
