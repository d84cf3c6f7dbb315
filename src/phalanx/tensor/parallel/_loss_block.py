"""The block inside which cross entropy keeps logits sharded that are so along the classes.

Owns ``loss_parallel``. torch.compile reads this module as it reads users' code; what it calls, ``_loss.cross_entropy``,
is one node of its graph.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from phalanx.tensor.parallel._loss import cross_entropy


class LossParallel(TorchFunctionMode, ContextDecorator):
    """What ``loss_parallel`` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            return cross_entropy(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def loss_parallel() -> LossParallel:
    """Inside the block, ``cross_entropy`` keeps logits sharded that are so along the classes.

    >>> with loss_parallel():   # doctest: +SKIP
    ...     F.cross_entropy(logits, target).backward()

    Other losses, class probabilities as target and label smoothing run as they do outside. Backward may be called
    inside or outside of the block.
    """
    return LossParallel()
