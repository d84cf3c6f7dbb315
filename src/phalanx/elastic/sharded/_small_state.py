"""SmallState: what every worker of a sharded job has of its state: buffers, the optimizer's options, the other objects.

Weights and the optimizer's state of them are in cells and are not here. A newcomer takes it at once, however large the
model is. A save of an unsharded job has the same under other names; both are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from phalanx.elastic.checkpoint._state import State, Stateful, StatefulObjects
from phalanx.elastic.sharded._object_cells import ObjectCells


class SmallState(StatefulObjects):
    """The objects of a sharded job."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping[str, Stateful], cells: ObjectCells
    ) -> None:
        super().__init__(model, optimizer, others)
        self._cells = cells

    def capture(self) -> State:
        return {
            "buffers": dict(self.model.named_buffers()),
            "groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
            ],
            "others": self._cells.marked({name: part.state_dict() for name, part in self.others.items()}),
        }

    def apply(self, state: State, *, but: Collection[str] = (), keep_options: bool = False) -> None:
        assert not keep_options, "sharded jobs have no state of the loop"
        self.check_names(state)
        live = dict(self.model.named_buffers())
        values = {**state.get("model", {}), **state["buffers"]}
        with torch.no_grad():
            for name, buffer in live.items():
                buffer.copy_(values[name])
        saved = state["groups"] if "groups" in state else state["optimizer"]["param_groups"]
        for group, options in zip(self.optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        self.apply_objects({name: value for name, value in state["others"].items() if name not in but})

    def apply_objects(self, states: Mapping[str, Any]) -> None:
        super().apply_objects(self._cells.with_live(dict(states)))
