"""``nn.init.sparse_`` on DTensors: torch's draws its rows from the rank's own generator, so replicas would differ.

Owns its counterpart and ``install``, which puts it in the way; other functions of ``nn.init`` are made of random
functions on tensors and need nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.random import _philox
from phalanx.tensor.random._distributions import NORMAL
from phalanx.tensor.random._drawing import check_generator, drawn, write
from phalanx.tensor.random._state import next_stream


def sparse_(tensor: DTensor, sparsity: float, std: float = 0.01, generator: Any = None) -> DTensor:
    """Normal values, of which each column loses the same number, in random rows."""
    check_generator({"generator": generator})
    if tensor.ndim != 2:
        raise ValueError(f"sparse_ on a DTensor needs 2 dims, got {tuple(tensor.shape)}")
    values = drawn(tensor, NORMAL.of(tensor.dtype, (tensor, 0.0, std)))
    spec = tensor._spec.cotangent
    rows, columns = spec.shape
    ranking = _philox.words(next_stream(spec.mesh), 0, rows * columns).reshape(rows, columns).argsort(axis=0)
    is_zero = torch.zeros(rows, columns, dtype=torch.bool)
    is_zero.scatter_(0, torch.from_numpy(ranking)[: math.ceil(sparsity * rows)], True)
    for dim in range(2):
        is_zero = is_zero.index_select(dim, torch.tensor(spec.local_indices(dim), dtype=torch.int64))
    with torch.no_grad():
        return write(tensor, values.masked_fill_(is_zero.to(values.device), 0), "sparse_")


def install() -> None:
    """Let ``nn.init.sparse_`` take DTensors. Does it once."""
    plain = nn.init.sparse_
    if hasattr(plain, "_phalanx"):
        return

    @functools.wraps(plain)
    def sparse(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (sparse_ if isinstance(tensor, DTensor) else plain)(tensor, *args, **kwargs)  # type: ignore[arg-type]  # a DTensor for the first

    sparse._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    nn.init.sparse_ = sparse
