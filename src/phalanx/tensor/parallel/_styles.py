"""Styles: what a module's parameters, inputs and outputs become on a one-axis mesh.

Owns the style classes. A style changes a module in place: it replaces parameters by DTensors and registers hooks around
forward that bring inputs and outputs into the layouts it was given. Plain tensors count as this rank's part in the layout
that the style names for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.comm import DeviceMesh
from phalanx.tensor._distribute import distribute_module, distribute_tensor
from phalanx.tensor._dtensor import DTensor
from phalanx.tensor._placement import Placement, Replicate, Shard

Layouts = Any  # a placement, or None, or a tuple of them, one per input


class ParallelStyle(ABC):
    """How to parallelize one module; see the subclasses."""

    src_data_rank: int | None = 0

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Lay out ``module`` over ``mesh`` and return it."""


def lifted(value: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None) -> Any:
    """A tensor as a DTensor laid out as ``wanted``; a plain one is this rank's part of the layout ``given``."""
    if not isinstance(value, Tensor) or given is None:
        return value
    made = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [given])
    return made if wanted is None else made.redistribute(placements=[wanted])


def _output(value: Any, placement: Placement, local: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    moved = value.redistribute(placements=[placement])
    return moved.to_local() if local else moved


def _parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src: int | None) -> None:
    parameter = module._parameters.get(name)
    if parameter is None or isinstance(parameter, DTensor):
        return
    made = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src)
    module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


class _Sharded(ParallelStyle):
    """Common to column-wise and row-wise: parameters by kind of module, one input, one output."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = input_layouts or self._default_input()
        self.output_layout = output_layouts or self._default_output()
        self.use_local_output = use_local_output

    def _default_input(self) -> Placement:
        raise NotImplementedError

    def _default_output(self) -> Placement:
        raise NotImplementedError

    def _parameters(self, module: nn.Module) -> dict[str, Placement]:
        raise NotImplementedError

    def _wanted_input(self, module: nn.Module) -> Placement:
        raise NotImplementedError

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise NotImplementedError(
                f"{type(self).__name__} knows nn.Linear and nn.Embedding, not {type(module).__name__}"
            )
        for name, placement in self._parameters(module).items():
            _parameter(module, name, mesh, placement, self.src_data_rank)
        wanted = self._wanted_input(module)

        def before(mod: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (lifted(inputs[0], mesh, self.input_layout, wanted), *inputs[1:])

        def after(mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return _output(outputs, self.output_layout, self.use_local_output)

        return distribute_module(module, mesh, None, before, after)


class ColwiseParallel(_Sharded):
    """Output features are cut: a linear layer's rows of the weight, an embedding's columns.

    >>> parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})   # doctest: +SKIP
    """

    def _default_input(self) -> Placement:
        return Replicate()

    def _default_output(self) -> Placement:
        return Shard(-1)

    def _parameters(self, module: nn.Module) -> dict[str, Placement]:
        return (
            {"weight": Shard(1)}
            if isinstance(module, nn.Embedding)
            else {"weight": Shard(0), "bias": Shard(0)}
        )

    def _wanted_input(self, module: nn.Module) -> Placement:
        return Replicate()


class RowwiseParallel(_Sharded):
    """Input features are cut: a linear layer's columns of the weight, an embedding's rows; results are summed."""

    def _default_input(self) -> Placement:
        return Shard(-1)

    def _default_output(self) -> Placement:
        return Replicate()

    def _parameters(self, module: nn.Module) -> dict[str, Placement]:
        return (
            {"weight": Shard(0)}
            if isinstance(module, nn.Embedding)
            else {"weight": Shard(1), "bias": Replicate()}
        )

    def _wanted_input(self, module: nn.Module) -> Placement:
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)


class SequenceParallel(ParallelStyle):
    """The sequence is cut, parameters are whole: norms and dropout between tensor-parallel layers."""

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.layout = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def before(mod: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (lifted(inputs[0], mesh, self.layout, self.layout), *inputs[1:])

        def after(mod: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local() if self.use_local_output and isinstance(outputs, DTensor) else outputs

        return distribute_module(module, mesh, None, before, after)


def _tuple(value: Any) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


class PrepareModuleInput(ParallelStyle):
    """Brings a module's inputs from one layout into another before forward; ``None`` leaves an input alone."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.given = _tuple(input_layouts)
        self.wanted = _tuple(desired_input_layouts)
        self.given_kwargs = input_kwarg_layouts or {}
        self.wanted_kwargs = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        if (self.given is None) != (self.wanted is None) or len(self.given or ()) != len(self.wanted or ()):
            raise ValueError(
                f"input_layouts {self.given} and desired_input_layouts {self.wanted} must have one length"
            )

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def before(mod: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.given is not None:
                if len(args) != len(self.given):
                    raise ValueError(
                        f"{type(mod).__name__} got {len(args)} inputs, but {len(self.given)} layouts were given"
                    )
                pairs = zip(args, self.given, self.wanted or (), strict=True)
                args = tuple(self._prepared(a, mesh, g, w) for a, g, w in pairs)
            kwargs = {
                k: self._prepared(v, mesh, self.given_kwargs.get(k), self.wanted_kwargs.get(k))
                for k, v in kwargs.items()
            }
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _prepared(
        self, value: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None
    ) -> Any:
        made = lifted(value, mesh, given, wanted)
        return made.to_local() if self.use_local_output and isinstance(made, DTensor) else made


class PrepareModuleOutput(ParallelStyle):
    """Brings a module's outputs from one layout into another after forward."""

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.given = _tuple(output_layouts) or ()
        self.wanted = _tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        if len(self.given) != len(self.wanted):
            raise ValueError(
                f"output_layouts {self.given} and desired_output_layouts {self.wanted} must have one length"
            )

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def after(mod: nn.Module, inputs: Any, outputs: Any) -> Any:
            single = not isinstance(outputs, (list, tuple))
            values: Sequence[Any] = [outputs] if single else outputs
            if len(values) != len(self.given):
                raise ValueError(
                    f"{type(mod).__name__} gave {len(values)} outputs, but {len(self.given)} layouts were given"
                )
            made = [lifted(v, mesh, g, w) for v, g, w in zip(values, self.given, self.wanted, strict=True)]
            made = [m.to_local() if self.use_local_output and isinstance(m, DTensor) else m for m in made]
            return made[0] if single else tuple(made)

        module.register_forward_hook(after)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Both of ``PrepareModuleInput`` and ``PrepareModuleOutput``."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.before = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.after = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return self.after.apply(self.before.apply(module, mesh), mesh)
