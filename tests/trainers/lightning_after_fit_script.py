"""Lightning as people write it: a data module with a hook, values by epoch, and validate, test, predict after the fit.

lightning_after_fit_script.py DIRECTORY [everywhere | shared]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.lightning import ElasticStrategy


class Data(pl.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 8, generator=generator)
        self.rows = TensorDataset(inputs, torch.randint(0, 3, (64,), generator=generator))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"half": loss / 2, "number": 3.0}, on_step=False, on_epoch=True)
        return {"loss": loss, "more": 1}

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(directory: Path, evaluate: str) -> None:
    data, model = Data(), Model()
    trainer = pl.Trainer(
        strategy=ElasticStrategy(4, 0, evaluate),
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(directory / "checkpoints", monitor="val", save_last=True)],
    )
    trainer.fit(model, datamodule=data)
    result = {
        "fit": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "validate": trainer.validate(model, datamodule=data, verbose=False),
        "test": trainer.test(model, datamodule=data, verbose=False),
        "best": trainer.test(datamodule=data, ckpt_path="best", verbose=False),
        "predict": torch.cat(trainer.predict(model, datamodule=data)).tolist(),
    }
    name = os.environ.get("PHALANX_WORKER_ID", "alone").replace("/", "_")
    (directory / f"result-{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "everywhere")
