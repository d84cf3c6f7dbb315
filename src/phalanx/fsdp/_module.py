"""FSDPModule: the methods that ``fully_shard`` adds to a module, ``UnshardHandle``, and what works on several modules.

Methods change the settings of the module's own unit; those with ``recurse`` of all units below it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, cast

from torch import Tensor, nn

from phalanx.fsdp._policies import AllGather, ReduceScatter
from phalanx.fsdp.schedule._module_state import ModuleState, state_of, wrap_method
from phalanx.fsdp.unit._unit import Unit

_ORIGINAL_CLASS = 2  # in the order of method resolution: FSDPLinear, FSDPModule, Linear


class UnshardHandle:
    """A gather under way; ``wait`` puts the whole parameters into the module."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Block until the parameters are there."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.gather()


class FSDPModule:
    """A module whose parameters are sharded between uses; made of a module by ``fully_shard``."""

    _is_unit = True
    """For ``layout_summary``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: ``model.layers[:2]`` builds a container like its own."""
        original: Any = cls.__mro__[_ORIGINAL_CLASS]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # ---- now

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit (not those below it). With ``async_op``, ``wait`` on what is returned."""
        unit = self._get_fsdp_state().unit
        if unit is not None:
            unit.is_kept = True
            unit.start_gather(async_op=async_op)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Put shards back into the module and free the whole parameters of its own unit."""
        unit = self._get_fsdp_state().unit
        if unit is not None:
            unit.release()

    def reset_iter_state(self) -> None:
        """Go back to between two steps after an error in forward or backward; gradients of that step are dropped.

        The next forward does the same by itself. Call it on the root.
        """
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError(f"reset_iter_state() of {_path(state)}: call it on the root module")
        state.context.reset(drop_gradients=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all shards, also of units that are gathered at the moment."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # the class is mixed into a module's
        for state in self._states(recurse=True):
            for parameter in () if state.unit is None else state.unit.parameters:
                if parameter.sharded.grad is not None:
                    if set_to_none:
                        parameter.sharded.grad = None
                    else:
                        parameter.local.grad.zero_()  # type: ignore[union-attr]  # the shard has one

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield shards, between two passes: what forward left gathered for a backward is put back first.

        An optimizer that got whole parameters would never see a gradient. Inside forward and backward, and after
        ``unshard()``, the parameters are whole.
        """
        for state in self._states(recurse=True):
            state.release_if_idle()
        found: Iterator[tuple[str, nn.Parameter]] = super().named_parameters(*args, **kwargs)  # type: ignore[misc]  # the class is mixed into a module's
        return found

    # ---- settings

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last of this forward; prefetching then starts anew after it."""
        self._get_fsdp_state().context.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward, or keep them whole on this rank, added up, until a backward that does."""
        for state in self._states(recurse):
            state.settings.reduce_gradients = requires_gradient_sync
            state.settings.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: sum gradients over them in backward, or only over shards until a backward that does."""
        for state in self._states(recurse):
            state.settings.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free whole parameters after forward (and gather again in backward), or keep them."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward({reshard_after_forward!r}): expected a bool")
        for state in self._states(recurse):
            state.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free whole parameters after backward, or keep them, for more micro-batches before the next update."""
        for state in self._states(recurse):
            state.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Begin to gather these modules when this one begins its forward."""
        self._get_fsdp_state().forward_prefetch = _states("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Begin to gather these modules when this one begins its backward."""
        self._get_fsdp_state().backward_prefetch = _states("set_modules_to_backward_prefetch", modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``, in place of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): expected a positive number")
        self._get_fsdp_state().settings.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does, under its old name."""
        warnings.warn("set_reduce_scatter_divide_factor is set_gradient_divide_factor now", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say that backward needs none of this unit's parameters (an embedding), so that it is not gathered there."""
        self._get_fsdp_state().settings.gather_in_backward = unshard_in_backward

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather with ``comm``; what it is given and fills are flat buffers of even parts, one per rank."""
        self._get_fsdp_state().settings.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce with ``comm``, which sums flat buffers of even parts, one per rank."""
        self._get_fsdp_state().settings.reduce_scatter = comm

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Run ``hook`` on this rank's piece of a unit's summed gradients (flat, divided) before shards get it."""
        if stream is not None:
            raise ValueError("set_all_reduce_hook(stream=...): hooks run where the reduction is waited for, pass none")
        self._get_fsdp_state().settings.all_reduce_hook = hook

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Let this many reductions be under way at once; each keeps a unit's whole gradients."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is an int, got a {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers={max_input_buffers}: expected at least 1")
        for state in self._states(recurse):
            state.context.max_reductions = max(max_input_buffers, 1)

    # ---- settings that change nothing here

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept; parameters without a gradient on some ranks always take part, with zeros."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept; reductions always are sums."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accept; the collectives of a group run in one order."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept; buffers always are memory that the group's transport uses in place where it can."""

    def set_post_optim_event(self, event: Any) -> None:
        """Accept; gathering begins behind everything that was called before it."""

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse: symmetric memory belongs to NCCL."""
        raise NotImplementedError(
            f"set_symm_mem_for_comm({backend!r}): this transport has no symmetric memory of NCCL's"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept; gathers that are asked for by forward or backward are waited for at once."""

    # ---- inside

    def _get_fsdp_state(self) -> ModuleState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AssertionError(f"{type(self).__name__} has lost its state: it is set by fully_shard")
        return state

    def _states(self, recurse: bool) -> Iterator[ModuleState]:
        if not recurse:
            yield self._get_fsdp_state()
            return
        for module in cast("nn.Module", self).modules():
            state = state_of(module)
            if state is not None:
                yield state

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty``, ``half``...: on the shards, which then find their way back into the unit's memory."""
        state = self._get_fsdp_state()
        if state.unit is not None:
            state.unit.release()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]  # the class is mixed into a module's
        if state.unit is not None:
            state.unit.bring_home(required=False)
        return result

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            f"a copy of {type(self).__name__} would share the unit of the original: build the module anew, call "
            f"fully_shard on it and load_state_dict() the other's state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: save its state_dict(), and load that into a new one")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of ``module`` run as its forward does: gathered before, resharded after.

    On a module that ``fully_shard`` was not called on nothing happens, so that a model can say it in any case.
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    wrap_method(cast("nn.Module", module), method_name)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several root modules (stages of a pipeline) share one context: one order of prefetching and reductions."""
    states = _states("share_comm_ctx", modules)
    if not states:
        return
    context = states[0].context
    for state in states[1:]:
        for other in state.context.states:
            if other.context is not context:
                other.context = context
                context.states.append(other)


def _states(call: str, modules: Sequence[Any]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{call} takes modules that fully_shard was called on, got a {type(module).__name__}")
    return [module._get_fsdp_state() for module in modules]


def _path(state: ModuleState) -> str:
    return "a module without parameters" if state.unit is None else str(state.unit)
