"""Hugging Face's Trainer on elastic workers: ``from phalanx.transformers import ElasticTrainer``.

Checks the installed releases and the private names that are used. Under ``phalanx run --on-failure heal`` it also takes
the launcher's ranks out of the environment: accelerate would form a process group of its own from them, which cannot
change. Import it before ``TrainingArguments`` are made.
"""

from __future__ import annotations

import os

from phalanx.integrations.accelerate import hide_ranks
from phalanx.integrations.frameworks import Framework

TRANSFORMERS = Framework(
    distribution="transformers",
    extra="transformers",
    first=(5, 22),
    before=(5, 24),
    names=(
        "transformers:Trainer._init_training_state",
        "transformers:Trainer._prepare_for_training",
        "transformers:Trainer._run_epoch",
        "transformers:Trainer._finalize_training",
        "transformers:Trainer._get_num_items_in_batch",
        "transformers:Trainer._clip_grad_norm",
        "transformers:Trainer._get_grad_norm",
        "transformers:Trainer._load_rng_state",
        "transformers:Trainer._save_checkpoint",
        "transformers:Trainer._load_best_model",
        "transformers:Trainer._get_output_dir",
        "transformers:Trainer.__init__=current_flos",
        "transformers:Trainer._inner_training_loop=_globalstep_last_logged",
        "transformers:Trainer._inner_training_loop=_initial_global_step",
        "transformers:Trainer._inner_training_loop=_initial_num_input_tokens_seen",
        "transformers:Trainer._inner_training_loop=_total_loss_scalar",
        "transformers:Trainer._inner_training_loop=_tr_loss",
        "transformers.trainer:TRAINER_STATE_NAME",
        "transformers:Trainer._track_num_input_tokens",
        "transformers.trainer:skip_first_batches",
        "transformers.trainer_callback:ExportableState.state",
    ),
)
"""What this adapter was tried with."""

ACCELERATE = Framework(
    distribution="accelerate",
    extra="transformers",
    first=(1, 12),
    before=(2,),
    names=(
        "accelerate.optimizer:AcceleratedOptimizer.__init__=_is_overflow",
        "accelerate.optimizer:AcceleratedOptimizer.step",
        "accelerate:PartialState",
    ),
)

hide_ranks(os.environ)
TRANSFORMERS.check()
ACCELERATE.check()

from phalanx.transformers._trainer import ElasticTrainer  # noqa: E402  # after the check: it imports transformers

__all__ = ["ElasticTrainer"]
