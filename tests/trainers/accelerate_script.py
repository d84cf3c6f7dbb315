"""A script as users of accelerate write it, knowing nothing of Phalanx; prints a digest on the first process."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator))
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for inputs, targets in loader:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = accelerator.unwrap_model(model).weight.detach().numpy().tobytes()
    words = [str(accelerator.num_processes), hashlib.sha256(weights).hexdigest()]
    (Path(sys.argv[1]) / "digest").write_text(" ".join(words))
    (Path(sys.argv[1]) / "kinds").write_text(type(model).__module__)
accelerator.end_training()
