"""What a wrapped module does on a rank that has no more data: the same collectives, with nothing to add."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.ddp.wrapper._join import JoinHook

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
        """All ranks end with the model of one that trained to the last."""
        self.ddp._sync_final_model(is_last_joiner)
