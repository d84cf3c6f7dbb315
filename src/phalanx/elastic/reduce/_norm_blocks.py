"""Computes the norm of a gradient that lies on any number of workers: one value, however it is cut.

Every parameter is cut into blocks of ``BLOCK`` elements from its own start; the last may be shorter. The norm of a
block comes from torch's kernel for the norms of rows, which treats every row by itself: same bits wherever the row lies
in memory, with any number of threads and of rows beside it (tested, not promised by torch). Their squares, in float64,
of all parameters in the model's order, are the leaves of one fixed tree of additions.

Who has ranges of parameters that begin at blocks (cells do) computes the sums of its blocks; all sums in order give the
norm. ``naive_block_sums`` is the reference: one block at a time. It costs what ``clip_grad_norm_`` does (ADR 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx._torch_private import foreach_mul_

BLOCK = 1024
"""Elements of a parameter whose squares are added up in one place. Cells begin at blocks only."""


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def block_sums(pieces: Sequence[Tensor]) -> Tensor:
    """Return the sums of squares of the blocks of each piece, one after the other, in float64.

    A piece is (a range of) a parameter's gradient in row-major order that begins at a block.

    >>> block_sums([torch.ones(1028), torch.full((2, 2), 2.0)])
    tensor([1024.,    4.,   16.], dtype=torch.float64)
    """
    with torch.no_grad():
        norms = [norms for piece in pieces for norms in _norms(piece)]
        return torch.cat(norms).double().square_() if norms else torch.zeros(0, dtype=torch.float64)


def naive_block_sums(pieces: Sequence[Tensor]) -> list[float]:
    """Return what ``block_sums`` does, one block at a time."""
    blocks = [block.clone() for piece in pieces for block in _flat(piece.detach()).split(BLOCK) if len(block)]
    return [float(torch.linalg.vector_norm(block)) ** 2 for block in blocks]


def _norms(piece: Tensor) -> Iterator[Tensor]:
    """Yield the norms of a piece's full blocks, and that of the rest."""
    flat = _flat(piece)
    count = flat.numel()
    full = count - count % BLOCK
    if full:
        yield torch.linalg.vector_norm(flat[:full].view(-1, BLOCK), dim=1)
    if full < count:
        yield torch.linalg.vector_norm(flat[full:] if full else flat, dim=0, keepdim=True)


def _flat(piece: Tensor) -> Tensor:
    """Return a piece in one dim, of a dtype in which norms have digits."""
    if piece.dtype not in (torch.float32, torch.float64):
        piece = piece.abs() if piece.is_complex() else piece.float()
    return piece.reshape(-1)


def tree_sum(sums: Tensor) -> float:
    """Add the sums of all blocks, in the order of parameters and blocks.

    >>> tree_sum(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    6.0
    """
    width = 1 << max(0, len(sums) - 1).bit_length()
    values = torch.zeros(width, dtype=torch.float64, device=sums.device)
    values[: len(sums)] = sums
    while width > 1:
        width //= 2
        values = values[:width] + values[width:]
    return float(values[0])


def norm_of(sums: Tensor) -> float:
    """Return the norm of the gradient whose blocks have these sums of squares; not finite if a value is not.

    >>> norm_of(block_sums([torch.full((9,), 2.0)]))
    6.0
    """
    total = tree_sum(sums)
    return math.sqrt(total) if total >= 0 else math.nan


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return what the gradient is multiplied by, as ``torch.nn.utils.clip_grad_norm_`` has it; nan if the norm is.

    >>> clip_coefficient(0.5, 1.0), round(clip_coefficient(4.0, 1.0), 4)
    (1.0, 0.25)
    """
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient >= 1.0 else coefficient


def clip(grads: Sequence[Tensor | None], sizes: Sequence[int], max_norm: float) -> float:
    """Clip the gradients of all parameters (of ``sizes`` elements, in the model's order) by their norm; return it.

    A parameter without a gradient counts as zeros.
    """
    norm = total_norm(grads, sizes)
    coefficient = clip_coefficient(norm, max_norm)
    found = [grad for grad in grads if grad is not None]
    if coefficient != 1.0 and found:  # to multiply by 1 changes no bit
        foreach_mul_(found, coefficient)
    return norm


def total_norm(grads: Sequence[Tensor | None], sizes: Sequence[int]) -> float:
    """Return the norm of the gradients of all parameters; one without counts as zeros."""
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return 0.0
    pieces = [like.new_zeros(size) if grad is None else grad for grad, size in zip(grads, sizes, strict=True)]
    return norm_of(block_sums(pieces))
