"""The state of Lightning's trainer that a newcomer takes over: loops, callbacks, schedulers, results of the epoch.

Owns what of a trainer goes beyond the job's own state (weights, optimizer, scaler, data position). Survivors keep
theirs. It is a full checkpoint as Lightning makes it, so that callbacks which keep state only there (averages of the
weights) have theirs; the tensors that the job sends anyhow are sent once. Invariant: it is made when the trainer asks
for its next batch, so a newcomer goes on there, as after a checkpoint in the middle of an epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loops.loop import _Loop

PROGRESS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
LEFT_OUT = ("optimizer_states", "hparams_name", "hparams_type", "hyper_parameters", "datamodule_hyper_parameters",
            "datamodule_hparams_name", "datamodule_hparams_type")  # fmt: skip


class TrainerState:
    """``Job(loop_state=...)`` of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_restarting = False
        self.is_taken = False
        """Whether this worker has taken it over from another."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in LEFT_OUT:
            checkpoint.pop(name, None)
        connector = trainer._logger_connector
        return {
            "checkpoint": checkpoint,
            "metrics": {name: dict(getattr(connector, f"_{name}")) for name in PROGRESS},
            "results": _dump_results(trainer.fit_loop.epoch_loop._results),
            "first_iteration": connector._first_loop_iter,
            "files": trainer.strategy.files.state_of(trainer),
            "should_stop": trainer.should_stop,
            "is_restarting": trainer.fit_loop.restarting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        connector._loaded_checkpoint = state["checkpoint"]
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_loops()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}
        for name, values in state["metrics"].items():
            getattr(trainer._logger_connector, f"_{name}").update(values)
        _load_results(trainer.fit_loop.epoch_loop._results, state["results"])
        trainer._logger_connector._first_loop_iter = state["first_iteration"]  # else the first log resets the results
        trainer.strategy.files.take(state["files"], trainer)
        trainer.should_stop = state["should_stop"]
        trainer.num_sanity_val_steps = 0  # it would reset all of this
        self._is_restarting = bool(state["is_restarting"])
        self.is_taken = True

    def go_on_at_next_batch(self) -> None:
        """Have the epoch's loop fetch a batch first. As after a checkpoint, it would look for an unfinished validation,
        but whoever made the state was past that. Until its epoch ends it would also take itself for resumed from a
        file, and leave out the schedulers at that end; it is what whoever made the state was."""
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        if not self.is_taken:
            return

        def reset() -> None:
            del loop.reset
            loop.reset()
            _Loop.restarting.fset(fit_loop, self._is_restarting)  # its own setter has another opinion
            loop.restarting = False

        loop.reset = reset


def _dump_results(results: Any) -> list[dict[str, Any]]:
    """Return what was logged in this epoch so far, of what is a mean."""
    return [
        {
            "key": [m.meta.fx, m.meta.name],
            "options": {"prog_bar": m.meta.prog_bar, "logger": m.meta.logger, "on_step": m.meta.on_step,
                        "on_epoch": m.meta.on_epoch},
            "value": m.value,
            "weight": m.cumulated_batch_size,
            "last": m._forward_cache,
            "has_reset": m.has_reset,
        }
        for m in results.values()
        if m.is_tensor and m.meta.is_mean_reduction
    ]  # fmt: skip


def _load_results(results: Any, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        fx, name = entry["key"]
        results.log(fx, name, torch.zeros(()), batch_size=1, **entry["options"])
        metric = results[f"{fx}.{name}"]
        metric.value, metric.cumulated_batch_size = entry["value"], entry["weight"]
        metric._forward_cache, metric.has_reset = entry["last"], entry["has_reset"]
