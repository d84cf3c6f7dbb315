"""Restores the buffers of a module (BatchNorm's running statistics and the like) for every slot.

Every slot of a step starts from the buffers that the step began with, so its result does not depend on which slots
ran before it in the same process; slot 0's buffers become those of the next step. Owns that restoring; how slot 0's
buffers reach the other workers is ``_layout``'s raw part.
"""

from __future__ import annotations

from torch import Tensor, nn

from phalanx._torch_private import foreach_copy_


class Buffers:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = [name for name, _ in module.named_buffers()]
        self._start: list[Tensor] = []

    def live(self) -> list[Tensor]:
        """Return the buffers now; a module may replace one by assignment, so they are looked up each time."""
        found = dict(self.module.named_buffers())
        if list(found) != self.names:
            raise RuntimeError(
                f"the model's buffers changed from {self.names} to {list(found)} during training; "
                "register all buffers before the job is made"
            )
        return list(found.values())

    def begin_step(self) -> None:
        """Remember the buffers that every slot of this step starts from."""
        live = self.live()
        if not self._start:
            self._start = [buffer.detach().clone() for buffer in live]
        elif live:
            foreach_copy_(self._start, [buffer.detach() for buffer in live])

    def at_start(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that every slot of this step starts from, by name."""
        return list(zip(self.names, self._start, strict=False))

    def restore(self) -> None:
        """Put the step's buffers back. All of them: BatchNorm's kernel changes its statistics without a trace."""
        live = [buffer.detach() for buffer in self.live()]
        if live and self._start:
            foreach_copy_(live, self._start)
