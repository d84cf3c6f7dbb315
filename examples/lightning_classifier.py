"""A Lightning module on workers that may die: python examples/lightning_classifier.py, or, with four of them,

phalanx run --nproc-per-node 4 --on-failure heal --preload lightning.pytorch examples/lightning_classifier.py
"""

import argparse
import hashlib

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx.lightning  # registers strategy="phalanx"

torch.set_num_threads(1)  # the bits depend on the number of threads, not on that of workers


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)  # the mean over all slots of all workers
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 8, 8, generator=generator) + labels[:, None, None] / 5, labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000)
    arguments = parser.parse_args()
    model = Classifier()
    trainer = pl.Trainer(
        strategy=phalanx.lightning.ElasticStrategy(num_slots=8, seed=0),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(images(arguments.samples, 1), batch_size=16, shuffle=True)  # 16 per slot, 128 per step
    trainer.fit(model, loader, DataLoader(images(500, 2), batch_size=100))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"{trainer.global_step} steps, {digest[:16]}")
