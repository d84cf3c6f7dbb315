"""ModuleState: what one ``fully_shard`` call does around forward and backward of its module (or modules).

Owns the hooks. Forward: gather before, release after. Backward: gather when a gradient reaches an output; when all
gradients of the inputs are there the module's own are too: release, reduce. A module that runs several times before
backward is reduced once, after the last of them. During backward a forward is a recomputation (activation
checkpointing), which neither releases nor counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx._nested_values import cast_floating
from phalanx.comm import Group
from phalanx.fsdp._policies import AllGather, MixedPrecisionPolicy, ReduceScatter
from phalanx.fsdp.schedule._graph_hooks import before_backward, outside_of_graphs
from phalanx.fsdp.schedule._step_context import StepContext
from phalanx.fsdp.unit._gradient_sum import Destination
from phalanx.fsdp.unit._unit import Unit, UnitState

_KEY = "_phalanx_fully_sharded"


@dataclass
class UnitSettings:
    """What the setters of ``FSDPModule`` change; read when something happens."""

    reshard_after_forward: bool | None = None
    """None: unless it is the root."""
    reshard_after_backward: bool = True
    gather_in_backward: bool = True
    reduce_gradients: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Any = None


def state_of(module: nn.Module) -> ModuleState | None:
    found: ModuleState | None = module.__dict__.get(_KEY)
    return found


class ModuleState:
    """The hooks of one ``fully_shard`` call, and the unit that they move (None: it has no parameters of its own)."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        unit: Unit | None,
        precision: MixedPrecisionPolicy,
        replicate: Group | None,
        settings: UnitSettings,
    ) -> None:
        self.modules = tuple(modules)
        self.unit = unit
        self.precision = precision
        self.replicate = replicate
        self.settings = settings
        self.context = StepContext()
        self.context.states.append(self)
        self.is_root: bool | None = None
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self._to_run: set[nn.Module] = set()
        self._calls = 0
        """Calls of forward whose backward is still to come."""
        self._in_backward = False
        if unit is not None:
            unit.settings_changed = self._apply_settings
            unit.gradient_arrived = self._gradient_arrived
        for module in modules:
            module.__dict__[_KEY] = self
            module.register_forward_pre_hook(outside_of_graphs(self._pre_forward), prepend=True, with_kwargs=True)
            module.register_forward_hook(outside_of_graphs(self._post_forward))
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    def _apply_settings(self) -> None:
        assert self.unit is not None, "a unit calls it"
        for section in self.unit.sections:
            section.use_comm(self.settings.all_gather)

    def _gradient_arrived(self) -> None:
        """See that this pass ends with a reduction, though it may reach no output: a gradient's own gradient."""
        self.context.enter_backward()

    # ---- the root

    def become_root(self) -> None:
        """Take all states below together in one context; names units by their paths from here."""
        found: dict[ModuleState, list[str]] = {}
        for path, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is not None:
                found.setdefault(state, []).append(path)
        self.is_root = True
        for state, paths in found.items():
            if state is not self:
                state.is_root = False
                if state.context is not self.context:
                    state.context = self.context
                    self.context.states.append(state)
            if state.unit is not None:
                state.unit.path = ", ".join(path or "root" for path in paths)

    @property
    def _reshards_after_forward(self) -> bool:
        chosen = self.settings.reshard_after_forward
        return not self.is_root if chosen is None else chosen

    # ---- forward

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.is_root is None:
            if len(self.modules) > 1:
                raise RuntimeError(
                    f"fully_shard got {len(self.modules)} modules as one unit and runs one of them as the root: call "
                    f"fully_shard also on the module that contains them"
                )
            self.become_root()
        context = self.context
        recomputed = context.in_backward
        if not recomputed:
            self._begin_forward(context)
        is_first = not self._to_run
        if is_first:
            self._to_run.update(self.modules)
        if self.precision.cast_forward_inputs:
            args, kwargs = cast_floating(self.precision.param_dtype, (args, kwargs))
        if self.unit is not None:
            self.unit.gather()
            if torch.is_grad_enabled():
                counted = not recomputed and before_backward((args, kwargs), self._end_of_call, first=True)
                self._calls += bool(counted)
                if recomputed:
                    before_backward((args, kwargs), self._end_of_recomputed_call, first=True)
        if is_first and not recomputed:
            self._prefetch_for_forward()
        return args, kwargs

    def _prefetch_for_forward(self) -> None:
        """Begin to gather what users named, or else what came next in the last forward; see ``gathers_early``."""
        following = None if self.unit is None else self.context.forward_order.next_after(self)
        for state in self.forward_prefetch:
            state.prefetch()
        if following is not None and not self.forward_prefetch and following.gathers_early:
            following.prefetch()

    @property
    def gathers_early(self) -> bool:
        """Whether to gather before it is needed, though nobody asked for it.

        On one host a gather is this rank's own work: begun early it would end no earlier, and two units be in memory.
        """
        return self.unit is not None and self.unit.group.backend != "shm"

    def _begin_forward(self, context: StepContext) -> None:
        if context.is_stale():
            context.reset(drop_gradients=True)
        elif context.forward_root is self:  # its last forward never ended
            context.reset(drop_gradients=False)
        if context.forward_root is None:
            context.forward_root = self
            context.forward_order.begin((self, torch.is_grad_enabled()))

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        context = self.context
        self._to_run.discard(module)
        if torch.is_grad_enabled():
            before_backward(output, self._begin_backward)
        if not context.in_backward:
            if not self._to_run:
                self._end_of_forward()
            if context.forward_root is self:
                for state in context.states:
                    if state._to_run:  # a group of modules of which some did not run
                        state._end_of_forward()
                    state.drop_unused()
                context.forward_root = None
                context.forward_order.end()
        return cast_floating(self.precision.output_dtype, output)

    def _end_of_forward(self) -> None:
        self._to_run.clear()
        if self.unit is not None:
            self.context.order.append(self)
            if self.context.holds_wholes:
                return
            if self._reshards_after_forward or not torch.is_grad_enabled():
                # without grad no backward will come for it
                self.unit.release(keep_part=torch.is_grad_enabled())

    def prefetch(self) -> None:
        """Begin to gather, where that goes on by itself while this rank computes."""
        if self.unit is not None and self.unit.group.size > 1:
            self.unit.prefetch()

    # ---- backward

    def _begin_backward(self) -> None:
        """Run when a gradient reaches an output."""
        context = self.context
        context.enter_backward()
        unit = self.unit
        if unit is None:
            return
        first = False
        if not self._in_backward:
            self._in_backward = True
            first = True
        if self.settings.gather_in_backward:
            unit.gather()
        if first:
            self._prefetch_for_backward()

    def _prefetch_for_backward(self) -> None:
        """Begin to gather what users named, or else what comes next in the reverse order of forward."""
        for state in self.backward_prefetch:
            state.prefetch()
        following = self.context.before(self)
        if following is None or self.backward_prefetch:
            return
        if following.settings.gather_in_backward and following.gathers_early:
            following.prefetch()

    def _end_of_call(self) -> None:
        """Run when all gradients of one call's inputs are there."""
        self._calls -= 1
        if self._calls <= 0:
            self._calls = 0
            self._post_backward()

    def _end_of_recomputed_call(self) -> None:
        if not self._calls:
            self._post_backward()

    def _post_backward(self) -> None:
        unit, settings = self.unit, self.settings
        if unit is None or not self._in_backward:
            return
        self._in_backward = False
        # With a driver, all ranks that run it reduce it: others may have gradients for what this rank did not use.
        writes = unit.has_gradients or unit.driver is not None or unit.accumulates()
        if settings.reshard_after_backward and not self.context.holds_wholes:
            unit.release()
        if settings.reduce_gradients and unit.is_trainable and writes:
            self.context.make_room(unit)
            unit.start_reduce(self._destination(unit), async_op=True)
            self.context.reducing(unit)

    def _destination(self, unit: Unit) -> Destination:
        settings = self.settings
        replicas = 1 if self.replicate is None else self.replicate.size
        factor = settings.divide_factor
        return Destination(
            shard=unit.group,
            replicate=self.replicate,
            factor=float(unit.group.size * replicas) if factor is None else factor,
            all_reduce=settings.all_reduce,
            comm=settings.reduce_scatter,
            hook=settings.all_reduce_hook,
        )

    def finish_backward(self) -> None:
        """Do at the end of a backward pass what no gradient of an input has caused."""
        if self._in_backward or (self.unit is not None and self.unit.has_gradients and self.settings.reduce_gradients):
            self._in_backward = True
            self._post_backward()

    def release_held(self) -> None:
        """Release what was not, for the sake of a graph of gradients."""
        unit = self.unit
        if unit is not None and not unit.is_kept and self.settings.reshard_after_backward:
            unit.release()

    def end_of_last_backward(self) -> None:
        self._calls = 0
        self.drop_unused()

    def drop_unused(self) -> None:
        """Give back what was prefetched in a pass that went another way; not what ``unshard(async_op=True)`` began."""
        unit = self.unit
        if unit is not None and unit.state is UnitState.ON_ITS_WAY and not unit.is_kept:
            unit.release()

    def reset(self) -> None:
        self._to_run.clear()
        self._calls = 0
        self._in_backward = False

    def release_if_idle(self) -> None:
        """Put the shards back, unless a pass runs or users asked for whole parameters."""
        context, unit = self.context, self.unit
        if unit is not None and not unit.is_kept and context.forward_root is None and not context.in_backward:
            unit.release()

    # ---- state dicts hold shards

    def _before_state_dict(self, *unused: Any) -> None:
        if self.unit is not None:
            self.unit.release()
            if self.unit.driver is not None:
                self.unit.driver.describes(self.unit)


def wrap_method(module: nn.Module, name: str) -> None:
    """Make ``module.name`` run between the hooks of forward."""
    original = getattr(module, name)
    state = state_of(module)
    if state is None:
        return

    def method(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state._pre_forward(module, args, kwargs)
        return state._post_forward(module, args, original(*args, **kwargs))

    setattr(module, name, partial(method))
