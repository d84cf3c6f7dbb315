"""An image classifier on generated pictures: BatchNorm, augmentation, mixed precision, evaluation, saves.

    phalanx run --nproc-per-node 2 --on-failure heal examples/image_classifier.py --out /tmp/pictures

Run it again with the same ``--out`` and it goes on where it was, on any number of workers.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.elastic import Job, RunOptions, Saves


class Stripes(torch.utils.data.Dataset):
    """Stripes in one of eight directions under noise; which direction is the class."""

    def __init__(self, length: int, seed: int, augment: bool) -> None:
        self.length, self.seed, self.augment = length, seed, augment
        ys, xs = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        angles = [math.pi * k / 8 for k in range(8)]
        self.waves = [xs * math.cos(angle) + ys * math.sin(angle) for angle in angles]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        own = torch.Generator().manual_seed(self.seed * 1_000_003 + index)  # the picture itself never changes
        label = index % 8
        phase = torch.rand(3, 1, 1, generator=own) * 6.28
        picture = torch.sin(self.waves[label] * 0.9 + phase) + torch.randn(3, 16, 16, generator=own)
        if self.augment:  # drawn from the slot's random numbers: the same on whichever worker loads it
            picture = picture * (1 + 0.2 * torch.randn(())) + 0.1 * torch.randn(3, 16, 16)
        return picture, label


def make_model() -> nn.Module:
    def block(fan_in: int, fan_out: int) -> list[nn.Module]:
        return [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]

    pool = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1)]
    return nn.Sequential(*block(3, 16), nn.MaxPool2d(2), *block(16, 32), *pool, nn.Linear(128, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="directory for logs and saves")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    test_set = Stripes(args.samples // 4, seed=2, augment=False)
    job = Job(
        model,
        optimizer,
        Stripes(args.samples, seed=1, augment=True),
        num_slots=8,
        slot_batch_size=16,
        saves=Saves(directory=args.out / "saves", every=20) if args.out else None,
        run=RunOptions(log_dir=args.out and args.out / "logs", threads=1),
    )

    def score(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits = model(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1]),
            "accuracy": (logits.argmax(1) == batch[1]).float().mean(),
        }

    for step in job.steps(epochs=args.epochs):
        for micro in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(micro.inputs), micro.targets)
            micro.backward(loss)
        step.commit(max_grad_norm=5.0)

    result = job.evaluate(test_set, score, batch_size=50)
    if job.rank == 0:
        print(f"{job.step} steps, test loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f}, {job.digest()}")


if __name__ == "__main__":
    main()
