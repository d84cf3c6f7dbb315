"""Facts about a step that ride along with its gradients: who used what, the weight, and wishes.

One float32 number per parameter ("used here") and a short header, summed over ranks by the same all-reduce that
carries the last bucket. So knowing that a parameter was used anywhere, the total weight, or that someone wants to
regroup, costs no collective of its own. If the last bucket is not float32, or a communication hook owns the bucket's
contents, the ledger travels as a tiny all-reduce of its own instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HEADER = 4  # weight, wants_regroup, roster_changed, contributors


@dataclass(frozen=True)
class Entry:
    """What one rank puts in; ``used`` has a byte per parameter, 1 if this rank has a gradient for it."""

    used: bytearray
    weight: float = 1.0
    wants_regroup: bool = False
    roster_changed: bool = False
    contributes: bool = True

    def write(self, tensor: Tensor) -> None:
        header = [self.weight, self.wants_regroup, self.roster_changed, self.contributes]
        tensor[:HEADER].copy_(tensor.new_tensor([float(value) for value in header]))
        tensor[HEADER:].copy_(torch.frombuffer(self.used, dtype=torch.uint8))


@dataclass(frozen=True)
class Totals:
    """What comes back, equal on all ranks."""

    used_anywhere: list[bool]
    weight: float
    regroup_wanted: bool
    roster_changed: bool
    contributors: int

    @classmethod
    def read(cls, tensor: Tensor) -> Totals:
        weight, regroup, roster, contributors = tensor[:HEADER].tolist()
        used = (tensor[HEADER:] > 0).tolist()
        return cls(used, weight, regroup > 0, roster > 0, round(contributors))


def length(num_params: int) -> int:
    return HEADER + num_params
