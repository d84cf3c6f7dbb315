"""Clipping and gradient scaling of pieces, where norm and overflow are known of the whole gradient.

A ``GradScaler`` looks for overflow in the gradients that it unscales, which are this worker's pieces alone. So pieces
are unscaled here, and the scaler is told what all workers found by a step of an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from phalanx._torch_private import foreach_mul_
from phalanx.elastic._guarding import is_finite
from phalanx.elastic.reduce._norm_blocks import clip_coefficient
from phalanx.elastic.sharded._pieces import Piece, PieceOptimizer


def clip(pieces: Sequence[Piece], norm: float, max_norm: float) -> None:
    """Scale gradients down to a norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = clip_coefficient(norm, max_norm)
    grads = [piece.tensor.grad for piece in pieces if piece.tensor.grad is not None]
    if factor != 1.0 and grads:
        foreach_mul_(grads, factor)


def unscale(scaler: Any, pieces: Sequence[Piece]) -> bool:
    """Divide the gradients of pieces by the loss scale; whether some of them are not finite."""
    if not scaler.is_enabled():
        return False
    factor = torch.tensor(scaler.get_scale()).double().reciprocal().float()
    found_inf = False
    for piece in pieces:
        if piece.tensor.grad is not None:
            found_inf = found_inf or not is_finite(piece.tensor.grad)
            piece.tensor.grad.mul_(factor)
    return found_inf


def update_scaled(scaler: Any, optimizer: PieceOptimizer, *, found_inf: bool) -> None:
    """Step unless a gradient overflowed on some worker, and have the scaler adapt its scale to that."""
    if not found_inf:
        optimizer.step()
    if scaler.is_enabled():
        scaler.scale(torch.zeros(1))  # one that had no slot has not made its scale yet
        probe = nn.Parameter(torch.zeros(1))
        probe.grad = torch.full((1,), float("inf") if found_inf else 0.0)
        scaler.step(torch.optim.SGD([probe], lr=0.0))
        scaler.update()
