"""Styles that shard a module's weights, or run it on shards of a sequence.

Owns ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel``. The communication of the usual pair, for a plain
input that is the same on every rank:

1. column-wise: nothing forward (each rank makes its own features); backward sums the input's gradient;
2. row-wise: forward sums the outputs (all-reduce, or reduce-scatter to a sharded layout); nothing backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from phalanx.comm import DeviceMesh
from phalanx.tensor.core._dtensor import DTensor
from phalanx.tensor.layout._placement import REPLICATE, Placement, Shard
from phalanx.tensor.parallel._style import ParallelStyle, enter, leave, place_parameters


class _OneInputOneOutput(ParallelStyle):
    """A module of one tensor in, one tensor out; subclasses say the layouts."""

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        super().__init__()
        self.input_layouts = (input_layouts,)
        self.output_layouts = (output_layouts,)
        self.use_local_output = use_local_output

    def _wanted_input(self, module: nn.Module) -> Placement | None:
        """Return the layout in which the module's weights want their input; None: as it comes."""
        raise NotImplementedError

    def _known_shape(self, module: nn.Module, local: Tensor) -> tuple[int, ...] | None:
        """Return the global shape of a plain input, where the module tells it (else sizes are gathered)."""
        return None

    def _attach(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Move input and output around the forward of ``module``."""
        wanted = self._wanted_input(module)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                raise TypeError(
                    f"{type(self).__name__}: {type(module).__name__} takes its input as first positional argument"
                )
            given = self.input_layouts[0]
            shape = None if isinstance(args[0], DTensor) else self._known_shape(module, args[0])
            return (enter(args[0], mesh, given, wanted, shape), *args[1:])

        def after(module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            return leave(output, self.output_layouts[0], self.use_local_output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_OneInputOneOutput):
    """Shard a Linear by its output features, an Embedding by its columns.

    >>> ColwiseParallel()
    ColwiseParallel(input_layouts=(R,), output_layouts=(S(-1),), use_local_output=True)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or REPLICATE, output_layouts or Shard(-1), use_local_output)

    def _wanted_input(self, module: nn.Module) -> Placement | None:
        return REPLICATE

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear):
            place_parameters(module, device_mesh, lambda name: Shard(0), self.src_data_rank)
        elif isinstance(module, nn.Embedding):
            place_parameters(module, device_mesh, lambda name: Shard(1), self.src_data_rank)
        else:
            raise NotImplementedError(_unknown(self, module))
        return self._attach(module, device_mesh)


class RowwiseParallel(_OneInputOneOutput):
    """Shard a Linear by its input features, an Embedding by its rows; outputs are summed.

    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=(S(-1),), output_layouts=(S(1),), use_local_output=True)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or REPLICATE, use_local_output)

    def _wanted_input(self, module: nn.Module) -> Placement | None:
        return Shard(-1) if isinstance(module, nn.Linear) else REPLICATE

    def _known_shape(self, module: nn.Module, local: Tensor) -> tuple[int, ...] | None:
        if isinstance(module, nn.Linear) and self.input_layouts[0] in (Shard(-1), Shard(local.dim() - 1)):
            return (*local.shape[:-1], module.in_features)
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear):
            layouts: dict[str, Placement] = {"weight": Shard(1), "bias": REPLICATE}
            place_parameters(module, device_mesh, layouts.get, self.src_data_rank)
        elif isinstance(module, nn.Embedding):
            place_parameters(module, device_mesh, lambda name: Shard(0), self.src_data_rank)
        else:
            raise NotImplementedError(_unknown(self, module))
        return self._attach(module, device_mesh)


class SequenceParallel(_OneInputOneOutput):
    """Run a normalisation or dropout on the rank's shard of the sequence; weights are replicated.

    >>> SequenceParallel(sequence_dim=2).sequence_sharding
    (S(2),)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(Shard(sequence_dim), Shard(sequence_dim), use_local_output)
        self.sequence_sharding = (Shard(sequence_dim),)

    def _wanted_input(self, module: nn.Module) -> Placement | None:
        return self.sequence_sharding[0]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, lambda name: REPLICATE, self.src_data_rank)
        return self._attach(module, device_mesh)


def _unknown(style: ParallelStyle, module: nn.Module) -> str:
    return (
        f"{type(style).__name__} knows nn.Linear and nn.Embedding, not {type(module).__name__}: name its layers in the "
        f"plan, or write a ParallelStyle for it"
    )
