"""Averages gradients over all ranks at first, then within subgroups, and the models now and then: post-local SGD.

After the first steps the models are averaged over all ranks every few steps (Lin et al., 2018, arXiv:1808.07217). The
hook reduces gradients; ``PeriodicModelAverager`` averages models; ``PostLocalSGDOptimizer`` joins an optimizer
with an averager.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._torch_faults import check_fused
from phalanx.ddp.buckets._bucket import GradBucket
from phalanx.ddp.buckets._local_tensors import described_part, local_part
from phalanx.ddp.hooks._future import finished
from phalanx.ddp.hooks._hook_group import resolve
from phalanx.ddp.hooks.default import mean_over

logger = logging.getLogger(__name__)

# Stands for a subgroup that pickling could not keep.
LOST = "lost by pickling"


class PostLocalSGDState:
    """Global averaging for ``start_localSGD_iter`` steps, then within ``subgroup``.

    ``subgroup`` None: no other rank, i.e. purely local gradients between two averagings of the models.
    ``post_local_gradient_allreduce=False`` also means purely local gradients.
    A pickled one leaves its groups out: the current group is used, and ``subgroup`` must be set again if it had one.
    """

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "process_group"}
        return {**state, "subgroup": None if self.subgroup is None else LOST}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group = None

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count steps: the last bucket ends one."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("local SGD starts after %d steps", self.iter)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Mean over all ranks, over the subgroup, or nothing, depending on the step."""
    buffer = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_over(state.process_group, buffer)
    if not state.post_local_gradient_allreduce or state.subgroup is None:
        return finished(buffer)
    if isinstance(state.subgroup, str):
        raise RuntimeError("the restored PostLocalSGDState had a subgroup: set state.subgroup to it again")
    return mean_over(state.subgroup, buffer)


class PeriodicModelAverager:
    """Average parameters over the group every ``period`` steps after ``warmup_steps``.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)      # doctest: +SKIP
    >>> averager.average_parameters(model.parameters())                   # after optimizer.step()  # doctest: +SKIP
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}; expected a number >= 0")
        if period < 1:
            raise ValueError(f"period={period}; expected a number >= 1")
        if period == 1:
            warnings.warn(
                "averaging the model after every step costs as much as averaging gradients: use plain DDP",
                stacklevel=2,
            )
        self.period = period
        self.warmup_steps = warmup_steps
        self.process_group = process_group
        self.step = 0

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average if this is the step for it: parameters, or an optimizer's groups, that have gradients."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters(_with_gradients(params), self.process_group)
        self.step += 1


@torch.no_grad()
def average_parameters(params: Iterable[nn.Parameter], process_group: Any = None) -> None:
    """Replace each parameter by its mean over the group, in one collective per dtype."""
    group = resolve(process_group)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    params = list(params)
    if process_group is None and any(described_part(param) for param in params):
        raise ValueError(
            f"rank {group.rank}: averaging parameters that are distributed needs the group of their replicas: give "
            "process_group, e.g. mesh['dp'].get_group(); other ranks hold other parts"
        )
    for param in map(local_part, params):
        by_dtype.setdefault(param.dtype, []).append(param)
    for same in by_dtype.values():
        flat = torch.cat([param.detach().reshape(-1) for param in same]).div_(group.size)
        group.all_reduce(flat)
        for param, value in zip(same, torch.split(flat, [param.numel() for param in same]), strict=True):
            param.copy_(value.view_as(param))


def _with_gradients(params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    flat: list[nn.Parameter] = []
    for item in params:
        if isinstance(item, dict):
            flat.extend(item["params"])
        elif isinstance(item, nn.Parameter):
            flat.append(item)
        else:
            raise NotImplementedError(
                f"got a {type(item).__name__}; expected parameters or an optimizer's param_groups"
            )
    return [param for param in flat if param.grad is not None]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer that also averages the model when its averager says so.

    >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)   # doctest: +SKIP
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: PeriodicModelAverager) -> None:
        self.optim = optim
        self.averager = averager
        self.param_groups = optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute there
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        if "step" not in state_dict:
            warnings.warn("the state has no averager step; starting from 0", stacklevel=2)
        self.averager.step = state_dict.get("step", 0)

    def step(self) -> None:  # type: ignore[override]  # no closure, as in torch's
        check_fused(self.optim, "PostLocalSGDOptimizer")
        self.optim.step()
        self.averager.average_parameters(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)
