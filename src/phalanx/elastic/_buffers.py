"""The buffers of a module (BatchNorm's running statistics and the like) under slots.

Every slot of a step starts from the buffers that the step began with, so its result does not depend on which slots
ran before it in the same process; slot 0's buffers become those of the next step. Owns that restoring; how slot 0's
buffers reach the other workers is ``_layout``'s raw part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names = [name for name, _ in module.named_buffers()]
        self._start: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []

    def live(self) -> list[Tensor]:
        """The buffers now; a module may replace one by assignment, so they are looked up each time."""
        found = dict(self.module.named_buffers())
        if list(found) != self._names:
            raise RuntimeError(
                f"the model's buffers changed from {self._names} to {list(found)} during training; "
                "register all buffers before the job is made"
            )
        return list(found.values())

    def begin_step(self) -> None:
        """Remember the buffers that every slot of this step starts from."""
        live = self.live()
        if not self._start:
            self._start = [buffer.detach().clone() for buffer in live]
        else:
            for start, buffer in zip(self._start, live, strict=True):
                start.copy_(buffer.detach())
        self._mark(live)

    def restore(self) -> None:
        """Put the step's buffers back, where a slot changed them."""
        live = self.live()
        with torch.no_grad():
            for start, buffer, seen in zip(self._start, live, self._seen, strict=True):
                if seen != (id(buffer), buffer._version):
                    buffer.copy_(start)
        self._mark(live)

    def _mark(self, live: list[Tensor]) -> None:
        self._seen = [(id(buffer), buffer._version) for buffer in live]
