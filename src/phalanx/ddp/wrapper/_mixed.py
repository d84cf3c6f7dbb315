"""Runs forward on low-precision copies of the parameters; gradients come back in full precision.

For the length of a forward each parameter's entry in its module is replaced by a cast of it. The cast is part of the
graph, so autograd itself returns gradients of the parameter's own dtype, accumulated into the one and only
parameter: nothing has to be switched back in backward, and optimizers and ``state_dict`` never see the copies.

Limit: code that runs the module's forward again during backward (activation checkpointing inside the module) would
see full-precision parameters; PyTorch then raises about mixed dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from phalanx._torch_private import flat_weight_names, flat_weights, module_parameters


@contextmanager
def cast_parameters(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> Iterator[None]:
    """Inside, ``module`` computes with its floating-point parameters cast to ``dtype`` (tied ones stay tied)."""
    if dtype is None:
        yield
        return
    casts: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for prefix, part in module.named_modules():
            for name, param in list(module_parameters(part).items()):
                full = f"{prefix}.{name}" if prefix else name
                if param is None or not param.is_floating_point() or full in ignored:
                    continue
                cast = casts.setdefault(id(param), param.to(dtype))
                replaced.append((part, name, param))
                _put(part, name, cast)
        yield
    finally:
        for part, name, param in replaced:
            _put(part, name, param)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    module_parameters(module)[name] = tensor  # a plain one for the length of a forward
    if isinstance(module, nn.RNNBase) and name in flat_weight_names(module):
        # Recurrent layers keep a second list of their weights.
        flat_weights(module)[flat_weight_names(module).index(name)] = tensor


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Floating-point buffers become ``dtype`` for good."""
    if dtype is None:
        return
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)
