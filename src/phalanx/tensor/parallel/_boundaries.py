"""Styles that only move what goes into a module and what comes out of it.

Owns ``PrepareModuleInput``, ``PrepareModuleOutput`` and ``PrepareModuleInputOutput``. A layout of None leaves its value
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from phalanx.comm import DeviceMesh
from phalanx.tensor.layout._placement import Placement
from phalanx.tensor.parallel._style import ParallelStyle, enter


def _as_tuple(layouts: Any) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _check_pairs(what: str, given: Sequence[Any] | None, wanted: Sequence[Any] | None) -> None:
    if given is None:
        return
    if wanted is None or len(wanted) != len(given):
        raise ValueError(f"{what}: {given} needs as many desired layouts, got {wanted}")


def _moved(
    values: Sequence[Any],
    mesh: DeviceMesh,
    given: Sequence[Placement | None],
    wanted: Sequence[Placement | None],
    local: bool,
    what: str,
) -> list[Any]:
    """Return each value from its given layout to its wanted one."""
    if len(values) != len(given):
        raise ValueError(f"{what}: got {len(values)} values for {len(given)} layouts {tuple(given)}")
    return [_moved_one(*one, mesh, local) for one in zip(values, given, wanted, strict=True)]


def _moved_one(value: Any, given: Placement | None, wanted: Placement | None, mesh: DeviceMesh, local: bool) -> Any:
    if given is None:
        return value
    tensor = enter(value, mesh, given, wanted)
    return tensor.to_local() if local else tensor


class PrepareModuleInput(ParallelStyle):
    """Move a module's inputs from the layouts they come in to those it wants.

    >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())   # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        _check_pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ValueError(
                f"input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}: give both for each"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            name = f"inputs of {type(module).__name__}"
            if self.input_layouts is not None:
                given, wanted = self.input_layouts, self.desired_input_layouts or ()
                args = tuple(_moved(args, device_mesh, given, wanted, self.use_local_output, name))
            layouts = self.desired_input_kwarg_layouts
            kwargs = {
                key: _moved_one(
                    value,
                    self.input_kwarg_layouts.get(key),
                    layouts.get(key),
                    device_mesh,
                    self.use_local_output,
                )
                for key, value in kwargs.items()
            }
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Move a module's outputs from the layouts it makes to those its users want.

    >>> style = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())   # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts) or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            values = list(output) if isinstance(output, (tuple, list)) else [output]
            name = f"outputs of {type(module).__name__}"
            given, wanted = self.output_layouts, self.desired_output_layouts
            moved = _moved(values, device_mesh, given, wanted, self.use_local_output, name)
            return tuple(moved) if isinstance(output, (tuple, list)) else moved[0]

        module.register_forward_hook(after)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` of one module in one."""

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)
