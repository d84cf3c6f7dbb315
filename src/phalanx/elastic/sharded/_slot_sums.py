"""Sums one section's gradients over the slots, on their owner: finished subtrees of the slot tree, as a binary counter.

The same additions with the same operands as ``reduce._partials`` makes of whole gradients, on the ranges that this
worker owns: an element's sum does not depend on who owns it. Slots are pushed in ascending order; at most
log2(num_slots) + 1 copies of the owned ranges exist.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.elastic.reduce._slots import Node, siblings


class SlotSums:
    """The owned ranges of one section, laid end to end, summed over the slots of one step."""

    def __init__(self, count: int, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = count
        self.num_slots = num_slots
        self.num_pushed = 0
        self._siblings = siblings(num_slots)
        self._pieces: list[tuple[Node, Tensor]] = []
        self._free: list[Tensor] = []
        self._dtype, self._device = dtype, device

    def push(self, slot: int, grad: Tensor | None) -> None:
        """Take in the gradient of a slot; None: the slot has no sample, or used none of these parameters."""
        assert slot == self.num_pushed < self.num_slots, f"slot {slot} came after {self.num_pushed} slots"
        self.num_pushed += 1
        node: Node = (slot, slot + 1)
        if self._pieces and self._siblings.get(node) == self._pieces[-1][0]:
            left, total = self._pieces.pop()
            # None is not a no-op: -0.0 becomes 0.0, as it does when zeros are added.
            total.add_(0.0 if grad is None else grad)
            node = (left[0], node[1])
        else:
            total = self._free.pop() if self._free else torch.empty(self.count, dtype=self._dtype, device=self._device)
            if grad is None:
                total.zero_()
            else:
                total.copy_(grad)
        self._pieces.append((node, total))
        self._carry()

    def fill(self, num_slots: int) -> None:
        """Push nothing for all slots up to so many."""
        while self.num_pushed < num_slots:
            self.push(self.num_pushed, None)

    def root(self) -> Tensor:
        """Return the sum over all slots; valid until the next step."""
        assert self.num_pushed == self.num_slots, f"{self.num_pushed} of {self.num_slots} slots were summed"
        return self._pieces[0][1]

    def reset(self) -> None:
        """Begin another step."""
        self._free += [total for _, total in self._pieces]
        self._pieces.clear()
        self.num_pushed = 0

    def _carry(self) -> None:
        while len(self._pieces) > 1:
            (left, into), (right, total) = self._pieces[-2:]
            if self._siblings.get(right) != left:
                return
            into.add_(total)
            self._free.append(total)
            self._pieces[-2:] = [((left[0], right[1]), into)]
