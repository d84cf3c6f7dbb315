"""Cross entropy of logits that are sharded by class, without gathering them.

Owns ``cross_entropy``, which ``loss_parallel`` puts in the place of torch's. It runs in three small reductions over the
axes that shard the classes, each of one number per row:

1. the largest logit (max), so that exponentials stay finite;
2. the sum of exponentials (sum);
3. the target's logit, which one rank holds (sum).

Backward needs no communication: each rank subtracts the one-hot target from its own shard of the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx._torch_private import assert_async
from phalanx.comm import Group
from phalanx.tensor.core._copied_views import checked_local
from phalanx.tensor.core._dtensor import DTensor, wrap
from phalanx.tensor.core._tracing import breaking_the_graph
from phalanx.tensor.layout._placement import REPLICATE, Placement, Shard
from phalanx.tensor.layout._spec import Spec
from phalanx.tensor.redistribute._log import listening, log_collectives
from phalanx.tensor.redistribute._traced import is_traced, traced_all_reduce

_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """``F.cross_entropy``, on shards of the classes where the logits are cut so. One node in a graph of torch.compile.

    Other losses, class probabilities as target and label smoothing run as torch's does.
    """
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if not _applies(given):
        return F.cross_entropy(*args, **kwargs)
    if not is_traced(given["input"]._local):
        return _cross_entropy(**given)
    with breaking_the_graph("cross_entropy"):
        return _cross_entropy(**given)


def _applies(given: dict[str, Any]) -> bool:
    logits, target = given.get("input"), given.get("target")
    if type(logits) is not DTensor or not logits.ndim or not isinstance(target, Tensor):
        return False
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if legacy or given.get("label_smoothing") or target.is_floating_point() or not logits.is_floating_point():
        return False
    if any(isinstance(p, Shard) and type(p) is not Shard for p in logits.placements):
        return False
    return bool(logits._spec.shards(_class_dim(logits)))


def _class_dim(logits: DTensor) -> int:
    return 1 if logits.ndim > 1 else 0


def _cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the loss as a DTensor: rows as the logits' other dims, summed or averaged as ``reduction`` says."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")
    logits = _without_partial(input)
    exact = torch.promote_types(logits.dtype, torch.float32)
    shown = exact if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    spec, dim = logits._spec, _class_dim(logits)
    rows = Spec.of(spec.mesh, [_row_placement(p, dim) for p in spec.placements], _row_shape(spec, dim), spec.dtype)
    local_target = _local_target(target, rows)
    _check_target(local_target, spec.shape[dim], ignore_index)
    scale = _row_weights(local_target, weight, ignore_index, exact)
    cut = _ClassShards(dim, spec.local_offset(dim), _class_groups(spec, dim))
    with listening() as heard:
        losses: Tensor = _RowLoss.apply(checked_local(logits), local_target, cut)  # type: ignore[no-untyped-call]  # torch's
    log_collectives("loss_parallel of", spec, heard)
    total: Tensor = wrap(losses * scale, rows)
    if reduction != "none":
        total = total.sum() if reduction == "sum" else total.sum() / wrap(scale, rows).sum()
    return total.to(shown)


class _ClassShards(NamedTuple):
    """Where this rank's classes are: the dim, the first class, and the groups that hold the others."""

    dim: int
    offset: int
    groups: tuple[Group, ...]


class _RowLoss(torch.autograd.Function):
    """The loss of each row, known to every rank of the groups; the gradient of each rank's own logits.

    Computed in float32 at least, as torch's is inside: a sum of exponents has few digits in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, target: Tensor, cut: _ClassShards) -> Tensor:
        logits = given.to(torch.promote_types(given.dtype, torch.float32))
        lowest = torch.finfo(logits.dtype).min
        shape = [n for d, n in enumerate(logits.shape) if d != cut.dim]
        largest = logits.amax(cut.dim) if logits.shape[cut.dim] else logits.new_full(shape, lowest)
        largest = _reduce(largest, cut.groups, "max")
        shifted = logits - largest.unsqueeze(cut.dim)
        total = _reduce(shifted.exp().sum(cut.dim), cut.groups, "sum")
        position, here = _own_position(logits, target, cut)
        if logits.shape[cut.dim]:
            found = shifted.gather(cut.dim, position).squeeze(cut.dim)
            picked = torch.where(here, found, 0.0)  # not a product: a masked class is -inf
        else:
            picked = torch.zeros_like(total)
        picked = _reduce(picked, cut.groups, "sum")
        log_total = total.log()
        ctx.save_for_backward(given, target, largest + log_total)
        ctx.cut = cut
        return log_total - picked

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, target, normaliser = ctx.saved_tensors
        softmax = (logits - normaliser.unsqueeze(ctx.cut.dim)).exp()
        position, here = _own_position(logits, target, ctx.cut)
        if logits.shape[ctx.cut.dim]:
            softmax.scatter_add_(ctx.cut.dim, position, -here.unsqueeze(ctx.cut.dim).to(softmax.dtype))
        return (softmax * grads[0].unsqueeze(ctx.cut.dim)).to(logits.dtype), None, None


def _own_position(logits: Tensor, target: Tensor, cut: _ClassShards) -> tuple[Tensor, Tensor]:
    """Return the target's index among this rank's classes (any, where it is not here), and whether it is here."""
    own = target - cut.offset
    here = (own >= 0) & (own < logits.shape[cut.dim])
    return own.masked_fill(~here, 0).unsqueeze(cut.dim), here


def _reduce(tensor: Tensor, groups: tuple[Group, ...], op: str) -> Tensor:
    """Reduce ``tensor`` in place; what torch.compile traces has no data, so there it is another one."""
    for group in groups:
        if is_traced(tensor):
            tensor = traced_all_reduce(tensor, group, op)
        else:
            group.all_reduce(tensor, op)
    return tensor


def _without_partial(logits: DTensor) -> DTensor:
    return logits.redistribute(placements=[REPLICATE if p.is_partial() else p for p in logits.placements])


def _row_placement(placement: Placement, dim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if placement.dim == dim:
        return REPLICATE
    return Shard(placement.dim - (placement.dim > dim))


def _row_shape(spec: Spec, dim: int) -> list[int]:
    return [n for d, n in enumerate(spec.shape) if d != dim]


def _class_groups(spec: Spec, dim: int) -> tuple[Group, ...]:
    return tuple(
        spec.mesh.get_group(axis) for axis, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim == dim
    )


def _local_target(target: Tensor, rows: Spec) -> Tensor:
    """Return this rank's rows of the target; a plain target is the same on every rank."""
    wanted = rows.with_dtype(target.dtype)
    if tuple(target.shape) != tuple(wanted.shape):
        raise ValueError(f"the target has shape {tuple(target.shape)}; the logits ask for {tuple(wanted.shape)}")
    if not isinstance(target, DTensor):
        target = wrap(target, wanted.replicated)
    return target.redistribute(placements=wanted.placements)._local


def _check_target(target: Tensor, num_classes: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if is_traced(target):
        assert_async(~wrong.any(), f"a target is out of range for {num_classes} classes")
        return
    if bool(wrong.any()):
        raise IndexError(f"target {int(target[wrong][0])} is out of range for {num_classes} classes")


def _row_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Say what each row counts: the weight of its class, zero if it is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(dtype)
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole[target.masked_fill(~counted, 0)] * counted
