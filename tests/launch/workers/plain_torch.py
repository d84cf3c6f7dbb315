"""A plain torch program: torch's names only, its own checkpoint, and a worker that dies in the first attempt."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

folder = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(4, 2))
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
checkpoint = os.path.join(folder, "checkpoint.pt")
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    first = saved["epoch"]
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 2, generator=generator))
sampler = DistributedSampler(data, None, None, False)
for epoch in range(first, 4):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=5, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, checkpoint)
    dist.barrier()
    if epoch == 1 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
fully_shard(block)
block(torch.randn(3, 4)).sum().backward()
mesh = dist.init_device_mesh("cpu", (2,))
tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
column = tp.parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": tp.ColwiseParallel()})
kinds = [model, sampler, block, tensor, column[0].weight]
if dist.get_rank() == 0:
    names = " ".join(sorted({kind.__module__ for each in kinds for kind in type(each).__mro__[:2]}))
    print(
        f"first={first} sum={sum(p.double().sum().item() for p in model.parameters()):.12f} kinds={names}", flush=True
    )
dist.destroy_process_group()
