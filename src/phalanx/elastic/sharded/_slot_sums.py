"""Sums one section's gradients over the slots, on their owner: finished subtrees of the slot tree, as a binary counter.

The same additions with the same operands as ``reduce._partials`` makes of whole gradients, on the ranges that this
worker owns: an element's sum does not depend on who owns it. Slots are pushed in ascending order; at most
log2(num_slots) + 1 copies of the owned ranges exist. The first slot's subtrees are summed where the root will be, which
may be the gradient itself; what other subtrees need is lent to all sections in turn (``Spares``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.elastic.reduce._slots import Node, siblings


class Spares:
    """Memory for sums that come and go, for all sections of a job: of one after the other, few are in use at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a buffer of at least so many elements, but not many more: another section may need those."""
        fitting = [
            one
            for one in self._free
            if count <= one.numel() <= 2 * count and (one.dtype, one.device) == (dtype, device)
        ]
        if not fitting:
            return torch.empty(count, dtype=dtype, device=device)
        best = min(fitting, key=Tensor.numel)
        self._free = [one for one in self._free if one is not best]
        return best

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        """Let go of what nobody uses: sections have other sizes from now on."""
        self._free.clear()


class SlotSums:
    """The owned ranges of one section, laid end to end, summed over the slots of one step; at last in ``home``."""

    def __init__(self, home: Tensor, num_slots: int, spares: Spares) -> None:
        self.home = home
        self.num_slots = num_slots
        self.num_pushed = 0
        self._siblings = siblings(num_slots)
        self._spares = spares
        self._pieces: list[tuple[Node, Tensor]] = []
        """Finished subtrees, and the buffers that begin with their sums."""

    @property
    def count(self) -> int:
        return self.home.numel()

    def push(self, slot: int, grad: Tensor | None) -> None:
        """Take in the gradient of a slot; None: the slot has no sample, or used none of these parameters."""
        assert slot == self.num_pushed < self.num_slots, f"slot {slot} came after {self.num_pushed} slots"
        self.num_pushed += 1
        node: Node = (slot, slot + 1)
        if self._pieces and self._siblings.get(node) == self._pieces[-1][0]:
            left, buffer = self._pieces.pop()
            # None is not a no-op: -0.0 becomes 0.0, as it does when zeros are added.
            buffer[: self.count].add_(0.0 if grad is None else grad)
            node = (left[0], node[1])
        else:
            buffer = self.home if slot == 0 else self._spares.take(self.count, self.home.dtype, self.home.device)
            if grad is None:
                buffer[: self.count].zero_()
            else:
                buffer[: self.count].copy_(grad)
        self._pieces.append((node, buffer))
        self._carry()

    def fill(self, num_slots: int) -> None:
        """Push nothing for all slots up to so many."""
        while self.num_pushed < num_slots:
            self.push(self.num_pushed, None)

    def root(self) -> Tensor:
        """Return the sum over all slots; valid until the next step."""
        assert self.num_pushed == self.num_slots, f"{self.num_pushed} of {self.num_slots} slots were summed"
        return self.home

    def reset(self) -> None:
        """Begin another step."""
        for _, buffer in self._pieces:
            if buffer is not self.home:
                self._spares.give_back(buffer)
        self._pieces.clear()
        self.num_pushed = 0

    def _carry(self) -> None:
        while len(self._pieces) > 1:
            (left, into), (right, buffer) = self._pieces[-2:]
            if self._siblings.get(right) != left:
                return
            into[: self.count].add_(buffer[: self.count])
            self._spares.give_back(buffer)
            self._pieces[-2:] = [((left[0], right[1]), into)]
