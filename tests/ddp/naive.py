"""The reference: reduce every gradient after backward, one parameter at a time, nothing clever.

Slow and obviously right; the tests compare the reducer with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.ddp.buckets._parameters import trained_parameters

if TYPE_CHECKING:
    from phalanx.comm import Group


class NaiveDataParallel(nn.Module):
    """Call ``reduce_gradients`` after each backward that shall be synchronised."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module = module
        self.group = group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            self.group.broadcast(buffer, 0)
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def reduce_gradients(self, weight: float | None = None, *, mean: bool = True) -> None:
        """Mean (or sum, or weighted mean) over the ranks; parameters that no rank used keep what they have."""
        total_weight = torch.tensor([1.0 if weight is None else weight])
        self.group.all_reduce(total_weight)
        for member in trained_parameters(self.module, ()):
            param = member.param
            used = torch.tensor([float(param.grad is not None)])
            self.group.all_reduce(used)
            if not used.item():
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            grad = (grad.to_dense() if grad.is_sparse else grad).clone()
            if weight is not None:
                grad *= weight
            elif mean:
                grad /= self.group.size
            self.group.all_reduce(grad)
            param.grad = grad / total_weight.item() if weight is not None else grad
