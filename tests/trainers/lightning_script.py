"""Trains a small model with Lightning's Trainer on an elastic job, and writes what this worker has at the end.

lightning_script.py DIRECTORY [--epochs N] [--kill rank:step:place,...] [--features a,b] [--resume] [--plain]
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from killing import Killings, Shards, run_script
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import phalanx.lightning  # noqa: F401  # registers the strategy
from phalanx.data import ShardedDataset
from phalanx.elastic import Job, RunOptions
from phalanx.lightning import ElasticStrategy

BATCH, SLOTS, SEED = 4, 6, 3


class Model(pl.LightningModule):
    def __init__(self, features: set[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = features
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.trainer.callbacks[0].at("validation", self.trainer)
        self.log("val", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if "plateau" in self.features:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(Callback):
    """Keeps every step's loss as this worker saw it, in the checkpoint; and kills."""

    def __init__(self, killings: Killings) -> None:
        self.seen: list[list] = []
        self.num_backward = [0, 0]
        self.killings = killings

    def at(self, place, trainer):
        job = trainer.strategy.job
        if job is not None and not trainer.sanity_checking:
            self.killings.at(place, job, trainer.global_step)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.killings.wait(trainer.strategy.job)
        self.at("batch_start", trainer)

    def on_before_backward(self, trainer, module, loss):
        assert loss.grad_fn is not None
        self.num_backward[0] += 1

    def on_after_backward(self, trainer, module):
        self.num_backward[1] += 1

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.at("reduced", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.killings.note(trainer.strategy._step)
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append([trainer.global_step, trainer.current_epoch, batch_idx, float(outputs["loss"]), lr])
        self.at("batch_end", trainer)

    def on_validation_end(self, trainer, module):
        self.at("validated", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.at("epoch_end", trainer)

    def on_train_end(self, trainer, module):
        self.at("train_end", trainer)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def data(length=204):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(length, 8, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def callbacks_of(features, directory, killings):
    found = [Watch(killings)]
    if "checkpoint" in features:
        found.append(ModelCheckpoint(directory / "checkpoints", every_n_train_steps=5, save_last=True))
    if "best" in features:
        found.append(ModelCheckpoint(directory / "checkpoints", monitor="val", save_top_k=2, save_last="link"))
    if "ema" in features:
        found.append(WeightAveraging(avg_fn=get_ema_avg_fn(0.9)))
    if "early" in features:
        found.append(EarlyStopping("val", patience=0, min_delta=0.02))
    return found


def fit(arguments, directory: Path) -> None:
    features = set(arguments.features.split(","))
    killings = Killings(directory, arguments.kill, arguments.size, arguments.adopt)
    callbacks = callbacks_of(features, directory, killings)
    loggers = [CSVLogger(directory, name="csv")] + [TensorBoardLogger(directory, name="tb")] * ("tb" in features)
    run = RunOptions(progress=False, log_dir=directory / "logs", verify=True, threads=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = pl.Trainer(
        strategy=ElasticStrategy(SLOTS, SEED, "shared" if "shared" in features else "everywhere", run),
        max_epochs=arguments.epochs,
        accelerator="cpu",
        default_root_dir=directory,
        logger=loggers,
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_checkpointing=bool(features & {"checkpoint", "best"}),
        enable_progress_bar="bar" in features,
        enable_model_summary=False,
        gradient_clip_val=0.5 if "fp16" in features else None,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if "fp16" in features else None,
    )
    model = Model(features)
    train = DataLoader(data(), batch_size=BATCH, shuffle=True)
    valid = DataLoader(data(40), batch_size=16)
    trainer.fit(model, train, valid, ckpt_path=arguments.resume or None)
    assert callbacks[0].num_backward[0] == callbacks[0].num_backward[1], "both hooks, for each slot that was computed"
    assert callbacks[0].num_backward[0] or "PHALANX_WORKER_ID" in os.environ
    name = os.environ.get("PHALANX_WORKER_ID", "alone").replace("/", "_")
    loops = trainer.fit_loop.state_dict()
    loops.pop("state_dict", None)
    result = {
        "digest": digest(model),
        "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "metrics": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "seen": callbacks[0].seen,
        "callbacks": {type(one).__name__: json.loads(json.dumps(one.state_dict(), default=float)) for one in callbacks},
    }
    text = json.dumps(result).replace(str(directory), "DIRECTORY")
    (directory / f"result-{name}.json").write_text(text)


def plain(epochs: int) -> str:
    """The same training as a loop over a job's steps; returns the digest."""
    model = Model(set())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    job = Job(model, optimizer, data(), num_slots=SLOTS, slot_batch_size=BATCH, seed=SEED, scheduler=scheduler,
              run=RunOptions(progress=False, threads=1))  # fmt: skip
    for step in job.steps(epochs=epochs):
        for micro in step:
            micro.backward(model.loss(micro.batch))
        step.commit()
    job.close()
    return digest(model)


class Manual(Model):
    def __init__(self):
        super().__init__(set())
        self.automatic_optimization = False


class OwnBackward(Model):
    def backward(self, loss, *args, **kwargs):
        loss.backward()


class OwnTransfer(Model):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class OwnClosure(Model):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=lambda: optimizer_closure())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(8))


class Several(Model):
    def __init__(self, make):
        super().__init__(set())
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


def refusals() -> dict[str, str]:
    """What is refused, by what it is, and the message."""
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    weighted = DataLoader(data(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * 204, 204))
    cases = {
        "accumulate": ({"accumulate_grad_batches": 2}, Model(set()), loader),
        "limit": ({"limit_train_batches": 3}, Model(set()), loader),
        "overfit": ({"overfit_batches": 2}, Model(set()), loader),
        "reload": ({"reload_dataloaders_every_n_epochs": 1}, Model(set()), loader),
        "time": ({"max_time": "00:00:01:00"}, Model(set()), loader),
        "manual": ({}, Manual(), loader),
        "several": ({}, Several(lambda m: [torch.optim.SGD(m.parameters(), 0.1)] * 2), loader),
        "lbfgs": ({}, Several(lambda m: torch.optim.LBFGS(m.parameters())), loader),
        "sampler": ({}, Model(set()), weighted),
        "iterable": ({}, Model(set()), DataLoader(Stream(), batch_size=BATCH)),
        "interval": ({"val_check_interval": "00:00:01:00"}, Model(set()), loader),
        "backward": ({}, OwnBackward(set()), loader),
        "transfer": ({}, OwnTransfer(set()), loader),
        "closure": ({}, OwnClosure(set()), loader),
    }
    found = {}
    for name, (options, model, train) in cases.items():
        try:
            pl.Trainer(strategy="phalanx", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                       enable_progress_bar=False, **options).fit(model, train)  # fmt: skip
            found[name] = "not refused"
        except ValueError as error:
            found[name] = str(error)
    found["second fit"] = second_fit(loader)
    return found


def order_over_shards() -> str:
    """What order a job has over a dataset of shards, where the loader shuffles."""
    rows = data(48)
    dataset = ShardedDataset(Shards(rows.__getitem__, 6, 8))
    trainer = pl.Trainer(strategy=ElasticStrategy(SLOTS, SEED), accelerator="cpu", max_steps=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Model(set()), DataLoader(dataset, batch_size=BATCH, shuffle=True))
    return trainer.strategy.job.schedule.sampler.order.name


def second_fit(loader) -> str:
    trainer = pl.Trainer(strategy="phalanx", accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Model(set()), loader)
    try:
        trainer.fit(Model(set()), loader)
    except ValueError as error:
        return str(error)
    return "not refused"


if __name__ == "__main__":
    run_script(fit, plain, lambda directory: refusals(), lambda directory: {"order": order_over_shards()})
