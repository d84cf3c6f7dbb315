"""StepContext: what the units of one model share while a step runs.

Owns the order in which units ran forward (backward prefetches along it), the reductions that are under way, and the end
of backward. One for each root module; ``share_comm_ctx`` lets several roots use one.

Invariant: at the end of every backward pass no reduction is under way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from phalanx._torch_private import current_graph_task_id, execution_engine
from phalanx.errors import CommError
from phalanx.fsdp.schedule._forward_order import ForwardOrder
from phalanx.fsdp.unit._unit import Unit, UnitState

if TYPE_CHECKING:
    from phalanx.fsdp.schedule._module_state import ModuleState


class StepContext:
    """State of one model's step."""

    def __init__(self) -> None:
        self.states: list[ModuleState] = []
        self.forward_root: ModuleState | None = None
        self.is_last_backward = True
        self.max_reductions = 1
        self.forward_order: ForwardOrder[ModuleState] = ForwardOrder()
        self.order: list[ModuleState] = []
        """States in the order in which they ended forward, since the last backward."""
        self.holds_wholes = False
        """From a backward pass with ``create_graph`` to the end of the next one without: the graph of gradients, which
        runs in no module's hooks, computes with whole parameters, so no unit is released meanwhile."""
        self._makes_graph = False
        self._reducing: deque[Unit] = deque()
        self._among_replicas: Unit | None = None
        """The unit whose parts of gradients the replicas add up."""
        self._backward = -1
        """The backward pass at whose end ``_end_of_backward`` will run."""

    # ---- backward

    @property
    def in_backward(self) -> bool:
        return bool(current_graph_task_id() != -1)

    def enter_backward(self) -> None:
        """Ask autograd to tell when this backward pass ends; once for each."""
        task = current_graph_task_id()
        if self._backward == -1:
            self._backward = task
            self._makes_graph = torch.is_grad_enabled()
            self.holds_wholes |= self._makes_graph
            execution_engine.queue_callback(self._end_of_backward)

    def before(self, state: ModuleState) -> ModuleState | None:
        """Return whose backward comes after that of ``state``, if it runs in the reverse order of forward."""
        while self.order:
            if self.order.pop() is state:
                return self.order[-1] if self.order else None
        return None

    def reducing(self, unit: Unit) -> None:
        self._reducing.append(unit)

    def finish_reductions(self) -> None:
        """Wait for all that is under way."""
        self._end_sums(keep=0)
        self._end_among_replicas()

    def _end_sums(self, keep: int) -> None:
        """Wait for the oldest sums over shard groups until ``keep`` are left; replicas go on with the last of them."""
        while len(self._reducing) > keep:
            unit = self._reducing.popleft()
            self._end_among_replicas()
            if unit.sum_replicas():
                self._among_replicas = unit
            else:
                unit.finish_reduce()

    def _end_among_replicas(self) -> None:
        unit, self._among_replicas = self._among_replicas, None
        if unit is not None:
            unit.finish_reduce()

    def make_room(self, unit: Unit) -> None:
        """Finish reductions until that of ``unit`` may start."""
        if unit in self._reducing or unit is self._among_replicas:
            self.finish_reductions()
        else:
            self._end_sums(keep=self.max_reductions - 1)

    def _end_of_backward(self) -> None:
        self._backward = -1
        for state in reversed(self.states):
            state.finish_backward()
        self.finish_reductions()
        if self.holds_wholes and not self._makes_graph:
            self.holds_wholes = False
            for state in self.states:
                state.release_held()
        if self.is_last_backward:
            self.order.clear()
            for state in self.states:
                state.end_of_last_backward()

    # ---- failures

    def is_stale(self) -> bool:
        """Return whether a forward or backward pass ended in an error and left its marks."""
        return not self.in_backward and self._backward != -1

    def reset(self, *, drop_gradients: bool) -> None:
        """Go back to between two steps: all units sharded, nothing under way."""
        for unit in (*self._reducing, self._among_replicas):
            if unit is not None:
                unit.drop_gradients()
        self._reducing.clear()
        self._among_replicas = None
        self._backward = -1
        self.holds_wholes = False
        self.forward_root = None
        self.order.clear()
        for state in self.states:
            state.reset()
            if state.unit is None:
                continue
            if drop_gradients:
                state.unit.drop_gradients()
            if state.unit.state is UnitState.ON_ITS_WAY and state.unit.driver is None:
                try:
                    state.unit.gather()  # peers have sent, or will: nobody may be left waiting for this rank's part
                except CommError:
                    pass  # the group is gone; whoever uses it next hears why
            state.unit.forget_gathered()
