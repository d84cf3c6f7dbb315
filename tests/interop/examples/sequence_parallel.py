"""The same network, its inputs and outputs cut over the ranks along the sequence."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 5))


def batch(step: int, replica: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * replica + step))


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device_type="cpu", mesh_shape=(world_size,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(build(), mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    for step in range(4):
        part = batch(step).chunk(world_size)[mesh.get_local_rank("tp")]
        loss = model(part).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [torch.empty(()) for _ in range(world_size)]
        torch.distributed.all_gather(losses, loss.detach(), group=mesh.get_group("tp"))
        if mesh.get_rank() == 0:
            print(f"loss {sum(losses).item():.6f}", flush=True)


if __name__ == "__main__":
    main()
