"""A script of accelerate's users with FSDP2, knowing nothing of Phalanx; leaves a digest and what the model became.

accelerate shards on accelerators only: where there is none, what it decides by the device is decided here.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for inputs, targets in loader:
    accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
weights = b"".join(param.full_tensor().detach().numpy().tobytes() for param in model.parameters())
if accelerator.is_main_process:
    words = [str(accelerator.num_processes), hashlib.sha256(weights).hexdigest()]
    (Path(sys.argv[1]) / "digest").write_text(" ".join(words))
    kinds = [type(model), type(model[0]), type(model[0].weight)]
    (Path(sys.argv[1]) / "kinds").write_text(" ".join(base.__module__ for kind in kinds for base in kind.__mro__[:2]))
accelerator.end_training()
