"""DDP keeps its contract: each byte of gradient is reduced once."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.comm import DeviceMesh
from phalanx.ddp import DistributedDataParallel
from phalanx.tensor.debug import check_contract, contracts


def test_each_byte_of_gradient_is_reduced_once() -> None:
    def build(mesh: DeviceMesh):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
        return model, lambda: model(torch.ones(4, 64)).sum().backward()

    for world_size in (2, 4):
        report = check_contract(
            build,
            lambda model, _: contracts.data_parallel(model, metadata=256),
            world_size=world_size,
            warmup=3,
            steps=3,
        )
        (traffic,) = report.values()
        assert traffic.nbytes < 1.01 * 4 * (64 * 128 + 128 + 128 * 8 + 8)
