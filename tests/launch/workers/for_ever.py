"""A worker that sums for ever. Appends "rank pid parent" to DIRECTORY/ready once all have met."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
for turn in range(10**9):
    dist.all_reduce(torch.ones(1))
    if turn == 0:
        with open(os.path.join(sys.argv[1], "ready"), "a") as file:
            file.write(f"{dist.get_rank()} {os.getpid()} {os.getppid()}\n")
