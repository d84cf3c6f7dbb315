"""Lists the hooks as an enumeration, to choose one by name in a configuration."""

from __future__ import annotations

from enum import Enum
from typing import Any

from phalanx.ddp.hooks import debugging, default, powersgd, quantization
from phalanx.ddp.hooks.default import Hook


class DDPCommHookType(Enum):
    """A hook and, for PowerSGD, its rank."""

    ALLREDUCE = "allreduce", default.allreduce_hook, 0
    FP16_COMPRESS = "fp16", default.fp16_compress_hook, 0
    BF16_COMPRESS = "bf16", default.bf16_compress_hook, 0
    QUANTIZE_PER_TENSOR = "quantize per tensor", quantization.quantization_pertensor_hook, 0
    QUANTIZE_PER_CHANNEL = "quantize per channel", quantization.quantization_perchannel_hook, 0
    POWER_SGD = "powersgd", powersgd.powerSGD_hook, 1
    POWER_SGD_RANK2 = "powersgd of rank 2", powersgd.powerSGD_hook, 2
    BATCHED_POWER_SGD = "batched powersgd", powersgd.batched_powerSGD_hook, 1
    BATCHED_POWER_SGD_RANK2 = "batched powersgd of rank 2", powersgd.batched_powerSGD_hook, 2
    NOOP = "noop", debugging.noop_hook, 0

    @property
    def hook(self) -> Hook:
        hook: Hook = self.value[1]
        return hook

    def state(self, process_group: Any, start_powerSGD_iter: int = 1_000) -> Any:
        """Return the state to register the hook with."""
        rank = self.value[2]
        if not rank:
            return process_group
        return powersgd.PowerSGDState(process_group, rank, start_powerSGD_iter=start_powerSGD_iter)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None, **options: Any) -> None:
    """Register a hook by its member; ``state`` is the group, ``options`` go to the member's ``state``."""
    model.register_comm_hook(comm_hook_type.state(state, **options), comm_hook_type.hook)
