"""An agent whose nodes meet through torch's own c10d rendezvous; rank 1 fails in the first generation."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.elastic.rendezvous as theirs
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from phalanx.launch import LaunchConfig, elastic_launch
from phalanx.launch.rendezvous import RendezvousParameters, rendezvous_handler_registry


def create(params: RendezvousParameters) -> Any:
    handler = get_rendezvous_handler(
        theirs.RendezvousParameters("c10d", params.endpoint, params.run_id, 2, 2, local_addr="127.0.0.1")
    )
    handler.get_backend = lambda: "theirs"
    return handler


def work() -> list[str]:
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if restarts == "0" and os.environ["RANK"] == "1":
        sys.exit(5)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [restarts, str(int(total)), os.environ["GROUP_WORLD_SIZE"], os.environ["ROLE_WORLD_SIZE"]]


if __name__ == "__main__":
    rendezvous_handler_registry.register("theirs", create)
    config = LaunchConfig(
        2,
        2,
        1,
        run_id="job",
        rdzv_backend="theirs",
        rdzv_endpoint=f"localhost:{sys.argv[1]}",
        max_restarts=2,
        start_method="fork",
    )
    for rank, value in elastic_launch(config, work)().items():
        print("VALUE", rank, *value)
