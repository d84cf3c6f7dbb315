"""The state of Hugging Face's Trainer that a newcomer takes over: TrainerState, callbacks, scheduler, counters.

Owns what goes beyond the job's own state (weights, optimizer, scaler, data position). Survivors keep theirs. Invariant:
it is made when the trainer asks for its next batch, at a step boundary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

LOCAL = ("is_world_process_zero", "is_local_process_zero", "stateful_callbacks")
"""Of TrainerState, what each worker has for itself."""

COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen",
            "current_flos")  # fmt: skip


class LoopState:
    """``Job(loop_state=...)`` of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counters: dict[str, Any] | None = None
        self.is_taken = False
        """Whether this worker has taken it over from another."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        return {
            "state": {name: value for name, value in state.items() if name not in LOCAL},
            "exported": [one.state()["attributes"] for one in self._exportable()],
            "control": trainer.control.state()["args"],
            "scheduler": trainer.lr_scheduler.state_dict(),
            "counters": {name: getattr(trainer, name) for name in COUNTERS},
            "loss": float(trainer._tr_loss),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for one, attributes in zip(self._exportable(), state["exported"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        trainer.lr_scheduler.load_state_dict(state["scheduler"])
        self._counters = {**state["counters"], "_tr_loss": torch.tensor(state["loss"], device=trainer.args.device)}
        self.is_taken = True

    def restore_counters(self) -> None:
        """Set what the trainer has set to its beginnings since; once."""
        for name, value in (self._counters or {}).items():
            setattr(self._trainer, name, value)
        self._counters = None

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
