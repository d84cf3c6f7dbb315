"""A plain torch DDP training script, ported. The lines that changed are marked; the model and the loss did not.

    torchrun --nproc-per-node 2 train.py                                    # before
    phalanx run --nproc-per-node 2 --on-failure heal examples/ddp_port.py   # after: any worker may die or join

What the port takes away: init_process_group, the DDP wrapper, DistributedSampler and its set_epoch, the loader, the
hand-written checkpoint and its resume, and ``if rank == 0`` around saving.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.elastic import Job, RunOptions, Saves

# before: dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()


def main(out: Path | None) -> None:
    torch.manual_seed(0)
    points = torch.randn(2048, 32, generator=torch.Generator().manual_seed(1))
    labels = (points[:, :4].sum(1) > 0).long()
    dataset = torch.utils.data.TensorDataset(points, labels)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # before: model = DDP(model)
    #         sampler = DistributedSampler(dataset)
    #         loader = DataLoader(dataset, batch_size=128 // world, sampler=sampler)
    #         if os.path.exists("checkpoint.pt"): ... load model, optimizer and epoch by hand
    job = Job(
        model,
        optimizer,
        dataset,
        num_slots=8,  # 8 x 16 = the global batch of 128, at any number of workers
        slot_batch_size=16,
        saves=Saves(directory=out / "saves", every=25) if out else None,
        run=RunOptions(log_dir=out and out / "logs", threads=1),
    )

    # before: for epoch in range(start, 3): sampler.set_epoch(epoch); for x, y in loader:
    for step in job.steps(epochs=3):
        for micro in step:
            loss = F.cross_entropy(model(micro.inputs), micro.targets)
            micro.backward(loss)  # before: loss.backward()
        step.commit()  # before: optimizer.step(); optimizer.zero_grad(); if rank == 0: torch.save(...)

    if job.rank == 0:
        print(f"{job.step} steps, loss {job.loss:.4f}, digest {job.digest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
