"""What of Hugging Face's Trainer an elastic job cannot do: refused when training begins, with what to use instead."""

from __future__ import annotations

from typing import Any

import torch

SHARDED = "use phalanx.fsdp.fully_shard with phalanx.elastic.Job"
NOT_HEALED = (
    "phalanx: in place are healed training steps, TrainerState and callbacks with ExportableState; not healed: what "
    "other callbacks keep, and random numbers drawn outside of compute_loss (a newcomer begins without them)"
)


def check_sharding(args: Any) -> None:
    """Raise ``ValueError`` for arguments that shard the model; before a trainer is made, which has other words."""
    for name, what in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if getattr(args, name, None):
            raise ValueError(f"ElasticTrainer does not take {what}: {SHARDED}")


def check_arguments(trainer: Any, *, evaluate: str) -> None:
    """Raise ``ValueError`` for settings that need another loop than a job's."""
    args = trainer.args
    refused = {
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}": (
            args.gradient_accumulation_steps != 1,
            "use num_slots: a step has num_slots batches of per_device_train_batch_size",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "workers would find different ones; set the batch size"),
        "DeepSpeed": (trainer.is_deepspeed_enabled, SHARDED),
        "FSDP": (trainer.is_fsdp_enabled, SHARDED),
        "several processes in one accelerate state": (
            args.world_size != 1,
            "run under 'phalanx run --on-failure heal', and import phalanx.transformers before making "
            "TrainingArguments: it hides the launcher's ranks from accelerate",
        ),
        f"{args.n_gpu} GPUs in one process": (args.n_gpu > 1, "start one worker per GPU"),
        "optim_target_modules and layer-wise optimizers": (
            "lomo" in str(args.optim) or "layerwise" in str(args.optim),
            "a step is one update of one optimizer; use adamw_torch",
        ),
        "LBFGS": (
            isinstance(trainer.optimizer, torch.optim.LBFGS),
            "it computes the gradient several times in a step; use an optimizer that needs it once",
        ),
        "a second train()": (
            trainer.job is not None,
            "a worker that joins could not tell which one the others are in; train once per process",
        ),
        "evaluate='shared' with compute_metrics": (
            evaluate == "shared" and trainer.compute_metrics is not None,
            "what is shared out has to be means over batches; use evaluate='everywhere'",
        ),
    }
    for what, (is_given, instead) in refused.items():
        if is_given:
            raise ValueError(f"ElasticTrainer does not take {what}: {instead}")
