"""What users decide about a unit: precision, offloading, which mesh axes shard. Values only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtype a unit is gathered and computed (``param_dtype``), and its gradients are summed
    (``reduce_dtype``).

    Sharded parameters, their gradients and the optimizer keep the original dtype. ``reduce_dtype`` defaults to
    ``param_dtype``; gradients that wait for a later synchronization wait in it too. Floating inputs of ``forward`` are
    cast to ``param_dtype`` unless ``cast_forward_inputs`` is False, floating outputs to ``output_dtype`` if it is set.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecisionPolicy({name}={dtype!r}): expected a floating dtype or None")


@dataclass
class OffloadPolicy:
    """Keeps shards on the mesh's device: the default."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps shards, their gradients and the optimizer's state in the host's memory.

    On a mesh of CPUs they are there anyhow, so that it changes nothing, ``pin_memory`` included; on another it is
    refused.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Names the axes of a larger mesh along which ``fully_shard`` shards and replicates; several are taken as one."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims() names no axis; expected shard=, replicate=, or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


class Comm(ABC):
    """What users bring to carry a unit's bytes in place of the group's own collective."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""


class AllGather(Comm):
    """See ``FSDPModule.set_custom_all_gather``. ``group`` is a ``phalanx.comm.Group``."""

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Fill ``output_tensor`` with all ranks' inputs; return None, or something to ``wait()`` for."""


class ReduceScatter(Comm):
    """See ``FSDPModule.set_custom_reduce_scatter``. ``op`` is always ``"sum"``."""

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Fill ``output_tensor`` with the sum of this rank's parts; return None, or something to ``wait()`` for."""
