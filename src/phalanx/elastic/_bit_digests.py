"""Digests that find wrong bits in a step: quick, since what is compared has just been computed by a colleague.

CRC-32 of the bytes: of two blocks that differ in one element of up to 4 bytes, or in any two bits, the digests differ,
always; of two that differ in any other way they are equal once in four thousand million times. Wider elements get
blake2b, which promises nothing and misses nothing. Who forges bits is not found by this; a state that is sent or saved
has a digest that finds forgers too (``checkpoint._stream``, ``checkpoint._digest_tree``).

Rejected: a sum of 64-bit words with odd weights, modulo 2^64, which is four times as quick. It sees each wrong word,
but of bit 63 only whether it is wrong in an odd number of words, whatever the weights: two float32 that have lost their
signs pass.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16384
"""Elements of a message under one digest."""
NARROW = 4
"""Bytes of an element of which CRC-32 finds every change."""


def digest_of(tensor: Tensor | None) -> str:
    """Return a digest of the bits; of None too.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.tensor([0.0, -0.0])), digest_of(None)
    (False, 'none')
    """
    if tensor is None:
        return "none"
    return "".join(digests_of(tensor, max(1, tensor.numel())))


def digests_of(tensor: Tensor, block: int) -> list[str]:
    """Return the digests of the blocks of so many elements in row-major order; the last may be shorter.

    >>> a, b = torch.zeros(5), torch.zeros(5)
    >>> b[3] = 1
    >>> [x == y for x, y in zip(digests_of(a, 2), digests_of(b, 2), strict=True)]
    [True, False, True]
    """
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    step = block * tensor.element_size()
    blocks = (data[at : at + step] for at in range(0, len(data), step))
    if tensor.element_size() <= NARROW:
        return [f"{zlib.crc32(one):08x}" for one in blocks]
    return [hashlib.blake2b(one, digest_size=16).hexdigest() for one in blocks]


def joined(digests: Sequence[str]) -> str:
    """Return one digest of many."""
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()


class MessageDigests:
    """Digests of the messages of one step, in blocks, in the order of buckets."""

    def __init__(self, size: int) -> None:
        self.of_sent: list[list[str]] = [[] for _ in range(size)]
        self.of_received: list[list[str]] = [[] for _ in range(size)]
        self.kinds: list[list[str]] = [[] for _ in range(size)]
        """Of each block that was received: of what kind the message was."""

    def sent(self, tensors: Sequence[Tensor], rank: int) -> None:
        for peer, tensor in _of_others(tensors, rank):
            self.of_sent[peer] += digests_of(tensor, BLOCK)

    def received(self, tensors: Sequence[Tensor], rank: int, kind: str = "gradients") -> None:
        for peer, tensor in _of_others(tensors, rank):
            found = digests_of(tensor, BLOCK)
            self.of_received[peer] += found
            self.kinds[peer] += [kind] * len(found)

    def of(self, kind: str) -> MessagesOfAKind:
        """Return what takes in messages of a kind."""
        return MessagesOfAKind(self, kind)


@dataclass(frozen=True)
class MessagesOfAKind:
    """Notes messages whose content has a name."""

    digests: MessageDigests
    kind: str

    def sent(self, tensors: Sequence[Tensor], rank: int) -> None:
        self.digests.sent(tensors, rank)

    def received(self, tensors: Sequence[Tensor], rank: int) -> None:
        self.digests.received(tensors, rank, self.kind)


def _of_others(tensors: Sequence[Tensor], rank: int) -> list[tuple[int, Tensor]]:
    """Return what is a message: what a worker keeps for itself is none."""
    return [(peer, tensor) for peer, tensor in enumerate(tensors) if peer != rank]
