"""Finds faults of torch itself that would pass unnoticed through what we run, by trying, and refuses them by name.

Owns ``check_fused``. In torch 2.13.0 the fused SGD kernel for CPUs writes nothing back for bfloat16 and float16 but
what is left over after full vectors, so that most elements never change; fused Adam, AdamW and Adagrad and all other
dtypes are right. The kernel is tried once, so that a torch that has mended it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx._devices import is_host

_HALVES = (torch.bfloat16, torch.float16)


@functools.cache
def fused_sgd_moves(dtype: torch.dtype) -> bool:
    """Return whether this torch's fused SGD changes parameters of ``dtype`` on the CPU."""
    param = torch.ones(256, dtype=dtype, device="cpu", requires_grad=True)
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return bool((param.detach() == 0.5).all())


def check_fused_tensors(params: Iterable[Tensor], where: str) -> None:
    """Raise if fused SGD would leave one of these local tensors as it is."""
    for param in params:
        if param.dtype in _HALVES and is_host(param) and not fused_sgd_moves(param.dtype):
            raise ValueError(
                f"{where}: torch.optim.SGD(fused=True) on a {param.dtype} parameter of {tuple(param.shape)} on the CPU "
                f"would not change it: the fused kernel of torch {torch.__version__} writes nothing back. Use "
                f"fused=False, foreach=True, or float32 parameters"
            )


def check_fused(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise if a step of ``optimizer`` would silently do nothing. Cheap enough for every step."""
    for group in optimizer.param_groups:
        if group.get("fused") and isinstance(optimizer, torch.optim.SGD):
            check_fused_tensors(group["params"], where)
