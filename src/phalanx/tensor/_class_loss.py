"""Cross entropy on logits whose classes are cut over the mesh, without gathering them.

Owns the computation behind ``loss_parallel``: the maximum and the sum of exponentials are reduced over ranks (one number
per row each), and each row's target logit comes from the one rank that holds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.tensor._dtensor import DTensor, wrap
from phalanx.tensor._placement import PARTIAL_SUM, REPLICATE, Placement, Shard
from phalanx.tensor._spec import Spec


def cross_entropy(
    logits: DTensor, target: DTensor, weight: Any, reduction: int, ignored: int, smoothing: float
) -> Any:
    """The loss of class indices; reduction is torch's number (0 none, 1 mean, 2 sum)."""
    if target.is_floating_point() or smoothing or logits.ndim < 2:
        raise NotImplementedError(
            "loss_parallel knows class indices without label smoothing, on logits of two dims or more"
        )
    spec = logits._spec
    # every rank needs the targets of its rows, whichever classes it holds
    rows: list[Placement] = [
        (Shard(p.dim - (p.dim > 1)) if p.dim != 1 else REPLICATE) if isinstance(p, Shard) else REPLICATE
        for p in spec.placements
    ]
    wanted: list[Placement] = [p if isinstance(p, Shard) else REPLICATE for p in spec.placements]
    logits = logits.redistribute(placements=wanted)
    target = target.redistribute(placements=rows)
    highest = _reduced_max(logits.detach(), rows)
    shifted = logits - highest.unsqueeze(1)
    total = shifted.exp().sum(1).redistribute(placements=rows).log()
    losses = total - _picked(shifted, target, ignored, rows)
    counted = target != ignored
    losses = losses * counted
    factor = counted.to(losses.dtype)
    if weight is not None:
        safe = torch.where(counted, target, torch.zeros_like(target))
        factor = torch.nn.functional.embedding(safe, weight.unsqueeze(1)).squeeze(-1) * factor
        losses = losses * factor
    if reduction == 0:
        return losses
    return losses.sum() if reduction == 2 else losses.sum() / factor.sum()


def _reduced_max(logits: DTensor, rows: list[Placement]) -> Any:
    """The maximum over classes, whole on every rank that holds the row; a rank without classes has none to offer."""
    spec = logits._spec
    local = logits._local
    if local.shape[1]:
        found = local.amax(1)
    else:
        found = local.new_full((local.shape[0], *local.shape[2:]), -torch.inf)
    shape = (*spec.shape[:1], *spec.shape[2:])
    for axis, p in enumerate(spec.placements):
        if isinstance(p, Shard) and p.dim == 1 and spec.mesh.shape[axis] > 1:
            spec.mesh.get_group(axis).all_reduce(found, "max")
    return wrap(found, Spec.of(spec.mesh, rows, shape, local.dtype))


def _picked(shifted: DTensor, target: DTensor, ignored: int, rows: list[Placement]) -> DTensor:
    """The target's logit of every row; zero from ranks that do not hold its class, and for ignored rows."""
    spec = shifted._spec
    own = target._local - spec.local_offset(1)
    local = shifted._local
    missing = (own < 0) | (own >= local.shape[1]) | (target._local == ignored)
    picked: Tensor
    if local.shape[1]:
        picked = (
            local.gather(1, own.masked_fill(missing, 0).unsqueeze(1)).squeeze(1).masked_fill(missing, 0.0)
        )
    else:
        picked = local.sum(1)  # of nothing: zeros that keep the graph
    placements = [
        PARTIAL_SUM if isinstance(p, Shard) and p.dim == 1 else row
        for p, row in zip(spec.placements, rows, strict=True)
    ]
    partial = wrap(picked, Spec.of(spec.mesh, placements, target.shape, local.dtype))
    return partial.redistribute(placements=rows)
