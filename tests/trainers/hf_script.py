"""Trains a small model with Hugging Face's Trainer on an elastic job, and writes what this worker has at the end.

hf_script.py DIRECTORY [--epochs N] [--kill rank:step:place,...] [--features a,b] [--resume DIR] [--plain]
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from killing import Killings, Shards, run_script
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from phalanx.data import ShardedDataset
from phalanx.elastic import Job, RunOptions
from phalanx.transformers import ElasticTrainer

BATCH, SLOTS, SEED = 2, 6, 3


class Watch(TrainerCallback):
    def __init__(self, killings: Killings) -> None:
        self.killings = killings
        self.trainer: ElasticTrainer | None = None

    def _at(self, place, state):
        self.killings.at(place, self.trainer.job, state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self.killings.wait(self.trainer.job)
        self._at("batch_start", state)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._at("reduced", state)

    def on_step_end(self, args, state, control, **kwargs):
        self.killings.note(self.trainer._step)
        self._at("batch_end", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._at("validation", state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._at("epoch_end", state)


def data(length=104):
    """Sequences of different lengths: what is masked does not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(length):
        ids = torch.randint(0, 50, (10,), generator=generator)
        labels = ids.clone()
        labels[: number % 5] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones(10, dtype=torch.long)})
    return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2,
                                        attention_dropout=0.1))  # fmt: skip


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def fit(arguments, directory: Path) -> None:
    features = set(arguments.features.split(","))
    watch = Watch(Killings(directory, arguments.kill, arguments.size, arguments.adopt))
    args = TrainingArguments(
        output_dir=str(directory / "out"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="reduce_lr_on_plateau" if "plateau" in features else "cosine",
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch" if "early" in features else "steps" if "checkpoint" in features else "no",
        save_steps=5,
        save_total_limit=2,
        metric_for_best_model="eval_loss",
        load_best_model_at_end="early" in features,
        include_num_input_tokens_seen="all",
        disable_tqdm="bar" not in features,
        report_to=["tensorboard"] if "tb" in features else [],
        use_cpu=True,
        seed=SEED,
        data_seed=SEED,
    )
    run = RunOptions(progress=False, log_dir=directory / "logs", verify=True, threads=1)
    extra = [EarlyStoppingCallback(1, 0.05)] if "early" in features else []
    model = make_model()
    trainer = ElasticTrainer(
        model=model, args=args, train_dataset=data(), eval_dataset=data(20), callbacks=[watch, *extra],
        num_slots=SLOTS, run=run, evaluate="shared" if "shared" in features else "everywhere",
    )  # fmt: skip
    watch.trainer = trainer
    if "fp16" in features:
        trainer.accelerator.scaler = make_scaler()  # accelerate makes none on this device
    trainer._save_rng_state = lambda folder: watch._at("saving", trainer.state)  # weights are written, the rest is not
    output = trainer.train(resume_from_checkpoint=arguments.resume or None)
    name = os.environ.get("PHALANX_WORKER_ID", "alone").replace("/", "_")
    timed = ("runtime", "per_second")
    result = {
        "digest": digest(model),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "loss": output.training_loss,
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "best": trainer.state.best_metric,
        "best_checkpoint": os.path.basename(trainer.state.best_model_checkpoint or ""),
        "scale": trainer.accelerator.scaler.get_scale() if "fp16" in features else None,
        "patience": [one.early_stopping_patience_counter for one in extra],
        "logs": [
            {key: value for key, value in entry.items() if not key.endswith(timed)}
            for entry in trainer.state.log_history
        ],
    }
    (directory / f"result-{name}.json").write_text(json.dumps(result))


def make_scaler():
    """Scales by so much that steps overflow, at first and again whenever it has grown."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**124, growth_interval=3)


def plain(epochs: int) -> str:
    """The same training as a loop over a job's steps; returns the digest."""
    return str(plain_loop(epochs)["digest"])


def plain_loop(epochs: int, scaler=None) -> dict[str, object]:
    torch.set_num_threads(1)
    model, rows = make_model(), data()
    decay = {name for name, param in model.named_parameters() if "norm" not in name}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n in decay], "weight_decay": 0.0},
            {"params": [p for n, p in model.named_parameters() if n not in decay], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True,
    )  # fmt: skip
    num_steps = epochs * -(-len(rows) // (BATCH * SLOTS))
    scheduler = get_scheduler("cosine", optimizer, 0, num_steps)
    job = Job(model, optimizer, rows, num_slots=SLOTS, slot_batch_size=BATCH, seed=SEED, scaler=scaler,
              run=RunOptions(progress=False))  # fmt: skip
    skipped = []
    model.train()
    for step in job.steps(epochs=epochs):
        for micro in step:
            items = int((micro.batch["labels"][..., 1:] != -100).sum())
            loss = model(**micro.batch, num_items_in_batch=items, use_cache=False).loss  # as Trainer sets it
            micro.backward(loss, weight=items)
        before = None if scaler is None else scaler.get_scale()
        step.commit(max_grad_norm=1.0)
        if scaler is not None and scaler.get_scale() < before:
            skipped.append(job.step)
        else:
            scheduler.step()
    job.close()
    return {"digest": digest(model), "lr": optimizer.param_groups[0]["lr"], "skipped": skipped}


class Skipped(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.trainer: ElasticTrainer | None = None

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.steps.append(state.global_step)


def small_trainer(directory: Path, dataset, *callbacks, **options) -> ElasticTrainer:
    args = TrainingArguments(output_dir=str(directory / "small"), use_cpu=True, report_to=[], disable_tqdm=True,
                             learning_rate=1e-2, lr_scheduler_type="cosine", per_device_train_batch_size=BATCH,
                             save_strategy="no", seed=SEED, data_seed=SEED, **options)  # fmt: skip
    return ElasticTrainer(model=make_model(), args=args, train_dataset=dataset, num_slots=SLOTS, callbacks=[*callbacks],
                          run=RunOptions(progress=False, threads=1))  # fmt: skip


def checks(directory: Path) -> dict[str, object]:
    """Steps that overflow beside a plain loop's; and the order over a dataset of shards."""
    skipped = Skipped()
    trainer = skipped.trainer = small_trainer(directory, data(), skipped, num_train_epochs=2)
    trainer.accelerator.scaler = make_scaler()
    trainer.train()
    found = {"digest": digest(trainer.model), "lr": trainer.optimizer.param_groups[0]["lr"], "skipped": skipped.steps}
    sharded = small_trainer(directory, ShardedDataset(Shards(data(48).__getitem__, 6, 8)), max_steps=2)
    sharded.train()
    order = sharded.job.schedule.sampler.order.name
    return {"overflow": found, "plain overflow": plain_loop(2, make_scaler()), "order": order}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(8))


def refusals(directory: Path) -> dict[str, str]:
    """What is refused, by what it is, and the message."""
    cases = {
        "accumulate": ({"gradient_accumulation_steps": 2}, {}, {}),
        "find": ({"auto_find_batch_size": True}, {}, {}),
        "sampler": ({"train_sampling_strategy": "group_by_length"}, {}, {}),
        "iterable": ({}, {"train_dataset": Stream()}, {}),
        "metrics": ({}, {"evaluate": "shared", "compute_metrics": lambda found: {}}, {}),
        "deepspeed": ({}, {}, {"is_deepspeed_enabled": True}),  # their arguments need their package
        "fsdp": ({"fsdp": True}, {}, {}),
        "fsdp of accelerate": ({}, {}, {"is_fsdp_enabled": True}),  # by its environment, with an accelerator only
        "lbfgs": ({}, {"optimizers": (torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]), None)}, {}),
        "second": ({}, {}, {"job": "the one of a first train()"}),
    }
    found = {}
    for name, (options, keywords, attributes) in cases.items():
        args = TrainingArguments(
            output_dir=str(directory / "refused"), use_cpu=True, report_to=[], max_steps=1, **options
        )
        try:
            trainer = ElasticTrainer(model=make_model(), args=args, **{"train_dataset": data(), **keywords})
            for attribute, value in attributes.items():
                setattr(trainer, attribute, value)
            trainer.train()
            found[name] = "not refused"
        except ValueError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    run_script(fit, plain, refusals, checks)
