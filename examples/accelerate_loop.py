"""A loop of accelerate's users on workers that may die: python examples/accelerate_loop.py, or, with four of them,

phalanx run --nproc-per-node 4 --on-failure heal --preload accelerate examples/accelerate_loop.py

accelerate prepares the model (mixed precision, device); gradients and data are the job's.
"""

import argparse
import os

import torch
from torch import nn

from phalanx.elastic import Job, RunOptions
from phalanx.integrations.accelerate import hide_ranks

hide_ranks(os.environ)  # accelerate would form a process group of its own, which cannot change

from accelerate import Accelerator  # noqa: E402  # after that


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x[:, :4].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    prepared = accelerator.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job(model, optimizer, Rows(arguments.samples), num_slots=8, slot_batch_size=16,
              run=RunOptions(progress=False, threads=1))  # fmt: skip
    for step in job.steps(epochs=arguments.epochs):
        for micro in step:
            loss = nn.functional.cross_entropy(prepared(micro.inputs), micro.targets)
            micro.backward(loss)  # in the place of accelerator.backward(loss)
        step.commit(max_grad_norm=1.0)  # of accelerator.clip_grad_norm_ and optimizer.step
    print(f"{job.step} steps, {job.digest()[:16]}")
