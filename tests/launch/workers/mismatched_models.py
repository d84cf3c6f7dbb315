"""A plain torch program with a mistake: the ranks build different models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3 + dist.get_rank())))
