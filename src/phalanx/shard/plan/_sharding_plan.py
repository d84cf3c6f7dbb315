"""Defines sharding plans: which parameter gets which spec, which submodule a sharder, what happens to outputs.

Owns ``ShardingPlan``, ``ShardingPlanner``, ``Sharder`` and the checks of a plan that need no communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.shard.tensor._sharding_spec import ShardingSpec


class Sharder(ABC):
    """Shards a submodule in a way of its own."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return what shall take the place of ``module``."""


@dataclass
class ShardingPlan:
    """How to shard a module.

    ``plan``: parameter name -> spec, or submodule name -> ``Sharder``. ``output_plan``: module name -> the spec that
    its sharded output is brought to. ``return_local_tensor``: modules whose sharded output becomes the local tensor.
    The empty name is the root module.

    >>> ShardingPlan(plan={"fc1.weight": spec}, output_plan={"fc1": out}, return_local_tensor=["fc1"])  # doctest: +SKIP
    """

    plan: dict[str, Any]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return a plan for ``module``."""


def check_plan(plan: ShardingPlan) -> None:
    """Raise for entries of wrong types, a sharder for the root, and parameters inside a sharder's submodule."""
    sharders = [name for name, spec in plan.plan.items() if isinstance(spec, Sharder)]
    if "" in sharders:
        raise KeyError("Module path must not be empty for custom sharder! Name the submodule that it shall replace")
    for name, spec in plan.plan.items():
        if not isinstance(spec, (ShardingSpec, Sharder)):
            raise TypeError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', found {type(spec).__name__}; "
                f"give it e.g. a ChunkShardingSpec"
            )
        inside = next((path for path in sharders if name != path and name.startswith(f"{path}.")), None)
        if inside is not None:
            raise RuntimeError(
                f"ShardingPlan is invalid: '{name}' lies in the submodule '{inside}', which a Sharder replaces; "
                f"remove one of the two entries"
            )
    for name, output in (plan.output_plan or {}).items():
        if not isinstance(output, ShardingSpec):
            raise TypeError(
                f"Only `ShardingSpec` is supported as output_plan for '{name}', found {type(output).__name__}; "
                f"give it e.g. a ChunkShardingSpec"
            )
