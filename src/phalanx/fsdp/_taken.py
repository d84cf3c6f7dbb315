"""Parameters that ``fully_shard`` has replaced: who still holds them is told, at the latest when an optimizer steps.

Owns the mark on an original parameter. An optimizer that was made before ``fully_shard`` holds originals, which no
backward reaches any more: it would train nothing and say nothing. So every optimizer is looked at in its first step
after a call of ``fully_shard``; later steps cost one lookup.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_phalanx_taken_by"


class _OptimizerWatch:
    """Looks at optimizers from the first ``fully_shard`` on."""

    def __init__(self) -> None:
        self._calls = 0
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def more_were_taken(self) -> None:
        if not self._calls:
            register_optimizer_step_pre_hook(self._before_step)
        self._calls += 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._seen.get(optimizer) != self._calls:
            _check(optimizer)
            self._seen[optimizer] = self._calls


_watch = _OptimizerWatch()


def mark_taken(parameters: dict[Tensor, str]) -> None:
    """Remember which unit and name has taken the place of each original."""
    for parameter, place in parameters.items():
        parameter.__dict__[_MARK] = place
    _watch.more_were_taken()


def taken_by(parameter: Tensor) -> str | None:
    """Return what has taken its place; None: it is nobody's yet."""
    found: str | None = parameter.__dict__.get(_MARK)
    return found


def _check(optimizer: Optimizer) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lost = [taken_by(parameter) for parameter in held if parameter.grad is None and taken_by(parameter)]
    if lost:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): {len(lost)} of its {len(held)} parameters were replaced by "
            f"fully_shard ({lost[0]}, ...) after the optimizer was made: no gradient reaches them any more, the model "
            f"would stay as it is, and their whole memory stays in use. Make the optimizer after fully_shard, from "
            f"model.parameters()"
        )
