"""Two axes: the network is cut along one, and replicas along the other see different samples."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))


def batch(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * replica + step))


def main() -> None:
    mesh = init_device_mesh("cpu", (2, int(os.environ["WORLD_SIZE"]) // 2), mesh_dim_names=("dp", "tp"))
    replicas = mesh["dp"].get_group()
    model = parallelize_module(build(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for step in range(4):
        loss = model(batch(step, dist.get_rank(replicas))).square().sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=replicas)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        if dist.get_rank() == 0:
            print(f"loss {total.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
