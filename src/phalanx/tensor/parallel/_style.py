"""What every style shares: its interface, placing weights, and moving values across a module's border.

Owns ``ParallelStyle``, ``place_parameters``, ``enter`` and ``leave``. A style works on a mesh of one axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from phalanx._torch_private import module_parameters
from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.dispatch._distribute import distribute_tensor, replicate_rest
from phalanx.tensor.layout._placement import Placement
from phalanx.tensor.redistribute._gathered import gathered

Layout = Callable[[str], "Placement | None"]


class ParallelStyle(ABC):
    """How one module is spread over a mesh axis; subclass it and write ``_apply`` for a style of your own.

    ``src_data_rank`` is set by ``parallelize_module``: whose weights count (None: each rank shards its own copy).
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute ``module`` in place and return it."""


def place_parameters(module: nn.Module, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None) -> None:
    """Distribute the module's own parameters as ``layout(name)`` says (None or unknown: replicated)."""
    for name, parameter in list(module_parameters(module).items()):
        placement = layout(name)
        if parameter is None or placement is None or isinstance(parameter, DTensor):
            continue
        placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    for part in module.modules():
        replicate_rest(part, mesh)


def enter(
    value: Any,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement | None,
    shape: Sequence[int] | None = None,
) -> DTensor:
    """``value``, which is laid out as ``given`` if it is a plain tensor, as a DTensor laid out as ``wanted``."""
    if isinstance(value, DTensor):
        tensor = value
    elif isinstance(value, Tensor):
        tensor = DTensor.from_local(value, mesh, [given], shape=shape)
    else:
        raise TypeError(f"expected a tensor laid out as {given!r}, got a {type(value).__name__}")
    return tensor if wanted is None else gathered(tensor, tensor.redistribute(placements=[wanted]))


def leave(tensor: DTensor, wanted: Placement, use_local_output: bool) -> Tensor:
    """``tensor`` laid out as ``wanted``, as this rank's plain tensor if ``use_local_output``."""
    moved = tensor.redistribute(placements=[wanted])
    return moved.to_local() if use_local_output else moved
