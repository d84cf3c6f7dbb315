"""Rearrangements of one tensor: flips, windows, diagonals, transforms, differences, shuffles, and copies of views.

Owns their rules, which say what ``_shape.dim_map`` needs: which dims are only carried along, where they go, and which
partial values may pass. Elements that only move keep every reduction; linear functions keep sums and means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.tensor.layout._placement import LINEAR_OPS
from phalanx.tensor.ops._rule import Call, Rule, Sharding, none_empty, none_thin, norm_dim
from phalanx.tensor.ops.rules._shape import along, as_tuple, dim_map


def except_dim(*fixed: int, partial: Sequence[str] = (), num_outputs: int = 1) -> Rule:
    """Make the rule of a function that works along these dims (negative: from the last): the others stay sharded."""

    def rule(call: Call) -> Sharding | None:
        if len(call.inputs) != 1:
            return None
        ndim = call.inputs[0].ndim
        keep = {d: d for d in range(ndim) if d not in fixed and d - ndim not in fixed}
        return dim_map(call, keep, is_view=False, partial=partial, num_outputs=num_outputs)

    return rule


def transform(default: tuple[int, ...] | None) -> Rule:
    """Make the rule of fft2, fftn and relatives, ``(input, s, dim)``: without dims, and without ``default`` ones, they
    transform the last of as many as ``s`` has, or all.
    """

    def rule(call: Call) -> Sharding | None:
        one = call.inputs[0]
        sizes, dims = call.arg(1, "s"), call.arg(2, "dim", default)
        if dims is None and sizes is not None:
            dims = tuple(range(-len(as_tuple(sizes)), 0))
        touched = set(range(one.ndim)) if dims is None else {norm_dim(d, one.ndim) for d in as_tuple(dims)}
        keep = {d: d for d in range(one.ndim) if d not in touched}
        sharding = dim_map(call, keep, is_view=False, partial=LINEAR_OPS)
        if sharding is not None:
            # of other dims meta tensors do not tell in which order the results are
            good = none_empty if all(d < min(touched) for d in keep) else none_thin
            sharding.valid = lambda placements: good(call, placements)
        return sharding

    return rule


def rotate(call: Call) -> Sharding | None:
    """``rot90(x, k, dims)``: by a quarter one of the two is flipped, and they are exchanged."""
    ndim = call.inputs[0].ndim
    first, second = (norm_dim(d, ndim) for d in call.arg(2, "dims", (0, 1)))
    mapping = {d: d for d in range(ndim) if d not in (first, second)}
    mapping |= ({first: first, second: second}, {first: second}, {}, {second: first})[call.arg(1, "k", 1) % 4]
    return dim_map(call, mapping, is_view=False)


def differences(call: Call) -> Sharding | None:
    """``diff(x, n, dim)``; none at all where n is zero."""
    dims = along(call, 2, "dim", -1) if call.arg(1, "n", 1) else set()
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim) if d not in dims}, is_view=False, partial=LINEAR_OPS)


def gradients(call: Call) -> Sharding | None:
    """``torch.gradient(x, spacing=, dim=)``: one result for each dim that is named."""
    if len(call.inputs) != 1:
        return None
    dims = along(call, 3, "dim")
    keep = {d: d for d in range(call.inputs[0].ndim) if d not in dims}
    return dim_map(call, keep, is_view=False, partial=LINEAR_OPS, num_outputs=len(dims))


def as_real(call: Call) -> Sharding | None:
    """view_as_real: real and imaginary parts are a new last dim."""
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim)}, partial=LINEAR_OPS)


def as_complex(call: Call) -> Sharding | None:
    """view_as_complex: the last dim holds real and imaginary parts."""
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim - 1)}, partial=LINEAR_OPS)


def diagonal(first: int, second: int) -> Rule:
    """``diagonal(x, offset, dim1, dim2)``: the other dims, and the diagonal behind them; with the defaults of both."""

    def rule(call: Call) -> Sharding | None:
        one = call.inputs[0]
        if one.ndim < 2:
            return None
        gone = {norm_dim(call.arg(2, "dim1", first), one.ndim), norm_dim(call.arg(3, "dim2", second), one.ndim)}
        return dim_map(call, {d: o for o, d in enumerate(d for d in range(one.ndim) if d not in gone)})

    return rule


def unfold(call: Call) -> Sharding | None:
    """``x.unfold(dim, size, step)``: windows along a dim, whose elements are a new last one."""
    dim = along(call, 1, "dimension")
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim) if d not in dim})


def slice_dim(call: Call) -> Sharding | None:
    """``aten.slice(x, dim, start, end, step)``."""
    one = call.inputs[0]
    dim = along(call, 1, "dim", 0)
    keep = {d: d for d in range(one.ndim) if d not in dim or one.shape == call.output_shapes()[0]}
    return dim_map(call, keep)


def at_least(call: Call) -> Sharding | None:
    """atleast_1d, 2d, 3d of one tensor: dims of size one are put around its own."""
    if len(call.inputs) != 1 or call.args != (call.inputs[0],):
        return None
    one, out = call.inputs[0], call.output_shapes()[0]
    shift = 1 if one.ndim == 1 and len(out) > 1 else 0
    return dim_map(call, {d: d + shift for d in range(one.ndim)})


def shuffled_pixels(call: Call) -> Sharding | None:
    """pixel_shuffle, pixel_unshuffle, channel_shuffle: dims before the channels; channels, rows and columns where they
    come in equal shards on both sides.
    """
    one, out = call.inputs[0], call.output_shapes()[0]
    mixed = 1 if call.name == "channel_shuffle" else -1  # its channels change places
    dims = [d for d in range(one.ndim) if one.shape[d] and d != mixed]
    changed = {d: (one.shape[d], out[d]) for d in dims if one.shape[d] != out[d]}
    return dim_map(call, {d: d for d in dims}, is_view=False, even=changed)


def repeat_interleave(call: Call) -> Sharding | None:
    """By a number, along a dim: the others stay sharded."""
    if call.arg(2, "dim") is None or len(call.inputs) != 1 or type(call.arg(1, "repeats")) is not int:
        return None
    dim = along(call, 2, "dim")
    return dim_map(call, {d: d for d in range(call.inputs[0].ndim) if d not in dim}, is_view=False)


def copying(rule: Rule) -> Rule:
    """Make the rule of a function that copies what another, whose rule this is, would have viewed."""

    def copied(call: Call) -> Sharding | None:
        sharding = rule(call)
        if sharding is None:
            return None
        sharding.is_view = False
        local, bind = sharding.local, sharding.bind
        if local is not None:
            sharding.local = lambda run, args, kwargs: _copy(local(run, args, kwargs))
        if bind is not None:
            sharding.bind = lambda run: _copied(bind(run))
        return sharding

    return copied


def _copied(view: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _copy(view(*args, **kwargs))


def _copy(view: Any) -> Any:
    return view.clone(memory_format=torch.contiguous_format)
