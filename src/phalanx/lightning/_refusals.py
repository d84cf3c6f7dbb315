"""What of Lightning an elastic job cannot do: refused when the fit begins, each with what to use instead.

Also the one line that says what is not healed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

NOT_HEALED = (
    "phalanx: in place are healed training steps and what callbacks keep in checkpoints; not healed: random "
    "numbers drawn outside of training_step, and what hooks keep elsewhere (a newcomer begins without it)"
)


def check_trainer(trainer: Any, model: Any) -> None:
    """Raise ``ValueError`` for settings that need another loop than a job's."""
    refused = {
        "a second fit": (
            trainer.fit_loop.epoch_progress.total.ready > 0 and trainer._checkpoint_connector._ckpt_path is None,
            "a worker that joins could not tell which one the others are in; call fit once per process",
        ),
        "manual optimization": (
            not model.automatic_optimization,
            "a step is all or nothing; write the loop with phalanx.elastic.Job",
        ),
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1,
            "use ElasticStrategy(num_slots=...): a step has num_slots batches",
        ),
        f"limit_train_batches={trainer.limit_train_batches}": (
            trainer.limit_train_batches != 1.0,
            "use max_steps, or a Subset of the dataset",
        ),
        f"overfit_batches={trainer.overfit_batches}": (trainer.overfit_batches > 0, "use a Subset of the dataset"),
        f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}": (
            trainer.reload_dataloaders_every_n_epochs > 0,
            "the job keeps one dataset; let the dataset itself change by epoch",
        ),
        "max_time": (
            any(type(callback).__name__ == "Timer" for callback in trainer.callbacks),
            "clocks differ between workers; use max_steps or max_epochs",
        ),
        "val_check_interval by time": (
            trainer._val_check_time_interval is not None,
            "clocks differ between workers; use a number of steps",
        ),
        **{
            f"a LightningModule with its own {name}": (is_overridden(name, model), instead)
            for name, instead in OVERRIDES.items()
        },
    }
    for what, (is_given, instead) in refused.items():
        if is_given:
            raise ValueError(f"strategy 'phalanx' does not take {what}: {instead}")


OVERRIDES = {
    "backward": "the job computes gradients by slot; change them in on_before_optimizer_step",
    "on_before_batch_transfer": "a batch is read by slot; do it in the loader's collate_fn",
}


def check_optimizers(optimizers: list[Any]) -> None:
    """Raise ``ValueError`` for optimizers that a step cannot drive."""
    if len(optimizers) != 1:
        raise several_optimizers(str(len(optimizers)))
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ValueError(
            "strategy 'phalanx' does not take LBFGS: it computes the gradient several times in a step. Use an "
            "optimizer that needs it once"
        )


def several_optimizers(count: str) -> ValueError:
    """Return the refusal of another number of optimizers than one."""
    return ValueError(
        f"strategy 'phalanx' does not take {count} optimizers: a step is one update. Put all parameters into one "
        "optimizer with several parameter groups, or write the loop with phalanx.elastic.Job"
    )
