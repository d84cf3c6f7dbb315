"""Which tensors hold nan or infinite values: a quick look that is nearly always enough, and names where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; integers always are.

    The sum of finite values is finite, unless it overflows: only then every value is looked at.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("inf")]))
    (True, False)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    tensor = tensor.detach()
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None
    return bool(torch.isfinite(tensor.sum(dtype=wide)).item()) or bool(torch.isfinite(tensor).all().item())


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """The names of those that are not finite."""
    return tuple(name for name, tensor in named if not is_finite(tensor))


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model and its optimizer, with a name that a person can look up."""
    names = {id(param): name for name, param in model.named_parameters()}
    yield from model.named_parameters()
    yield from model.named_buffers()
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"optimizer's {key} of {names.get(id(param), 'a parameter')}", value
