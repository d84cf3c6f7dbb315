"""A feed-forward network cut over the ranks: the first layer by columns, the second by rows."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))


def batch(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * replica + step))


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for step in range(4):
        loss = model(batch(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
