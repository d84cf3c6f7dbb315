"""Mirrors a wrapped module on a rank that has no more data: the same collectives, with nothing to add.

Owns what the ranks of a wrapper ask each other inside ``Join``; the class has these functions as methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.ddp.wrapper._join import JoinHook
from phalanx.ddp.wrapper._module_buffers import sync_module_states

if TYPE_CHECKING:
    from phalanx.ddp.wrapper._wrapper import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """Mirrors forward and backward of a ``DistributedDataParallel``."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        self.ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """In the order of ``forward``: buffers, whether this iteration synchronises, then every bucket."""
        ddp = self.ddp
        ddp._check_and_sync_module_buffers()
        if not ddp._check_global_requires_backward_grad_sync(is_joined_rank=True):
            ddp.require_forward_param_sync = False
            return
        ddp.require_forward_param_sync = True
        for reducer in ddp._reducers:
            reducer.mirror_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that trained to the last."""
        self.ddp._sync_final_model(is_last_joiner)


def find_common_rank(ddp: DistributedDataParallel, input_rank: int, rank_cond: bool) -> int:
    """Find the highest rank for which ``rank_cond`` holds, agreed by all."""
    rank = torch.tensor([input_rank if rank_cond else -1], device=ddp.device)
    ddp.group.all_reduce(rank, "max")
    if rank.item() < 0:
        ddp._log_and_throw(ValueError, "no rank satisfies the condition")
    return int(rank.item())


def check_global_requires_backward_grad_sync(ddp: DistributedDataParallel, is_joined_rank: bool) -> bool:
    """Ask whether the active ranks synchronise in this iteration; a joined rank asks, active ranks answer."""
    answer = torch.full((1,), float(not is_joined_rank and ddp._will_sync()), device=ddp.device)
    ddp.group.all_reduce(answer)
    return bool(answer.item())


def check_and_sync_module_buffers(ddp: DistributedDataParallel) -> None:
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_module_buffers(ddp._find_common_rank(ddp._distributed_rank, False))


def sync_final_model(ddp: DistributedDataParallel, is_last_joiner: bool) -> None:
    src = ddp._find_common_rank(ddp._distributed_rank, is_last_joiner)
    buffers = ddp.forward_sync_buffers
    sync_module_states(ddp.group, ddp.module, ddp.parameters_to_ignore, src=src, buffers=buffers)
