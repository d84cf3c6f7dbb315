"""Lays out everything that a step must exchange in a few flat tensors.

Owns the layout (buckets of one dtype each, in the order of the model) and ``Flat``, one set of buckets with its views.
The first bucket is always float32 and carries, behind its gradients, the numbers that ride along (``SCALARS``, one "was
it used" count per parameter, one note and two times per slot) and behind those the bytes of the module's buffers.
Gradients come in the reverse order of the model, so buckets are exchanged in that order (``send_order``): the first
one, with what is known only at the end, comes last.

Invariants: sums touch the first ``num_summed`` elements only. What lies behind, the raw part, is never added: in
every addition the left operand's bytes stay, and slot 0 is the leftmost leaf, so the root holds slot 0's buffers,
whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx._torch_private import foreach_copy_

SCALARS = ("loss", "weight", "samples", "logs", "wish", "leaving", "again")
"""Sums over slots that ride along: weighted loss, weight, samples, whether anything was logged; and, of workers, who
wants to regroup or leave, and who computes the step again because it was not finite."""

NUM_PER_SLOT = 3
"""Numbers of each slot alone that ride along: a note, and the seconds of its computation and of its data."""

BUCKET_BYTES = 16 << 20
"""What a bucket holds at least, but for the first of a dtype: so that a collective costs little beside its bytes."""

ALIGN = 16
"""Views start at multiples of this many elements, so that vector instructions see aligned data."""


@dataclass(frozen=True)
class Bucket:
    """One flat tensor of a dtype: which parameters it holds at which offsets, and its lengths in elements."""

    dtype: torch.dtype
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    num_summed: int
    length: int


@dataclass(frozen=True)
class FlatLayout:
    """The buckets of a model; the same on every worker that built the same model."""

    device: torch.device
    shapes: tuple[torch.Size, ...]
    buckets: tuple[Bucket, ...]
    extras_offset: int
    raw_sizes: tuple[int, ...]
    """Bytes of each buffer of the module."""
    num_slots: int = 0
    """How many slots have a place for numbers of their own."""

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        num_slots: int = 0,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> FlatLayout:
        """Lay out the gradients of ``params``, the values of ``buffers`` and a note per slot."""
        devices = {tensor.device for tensor in [*params, *buffers]} or {torch.device("cpu")}
        if len(devices) > 1:
            raise ValueError(f"the model is spread over devices {sorted(map(str, devices))}; expected one device")
        raw_sizes = tuple(buffer.numel() * buffer.element_size() for buffer in buffers)
        dtypes = [torch.float32, *sorted({p.dtype for p in params} - {torch.float32}, key=str)]
        buckets: list[Bucket] = []
        extras_offset = 0
        for dtype, members in _cut(params, dtypes, bucket_bytes):
            offsets, end = [], 0
            for i in members:
                offsets.append(end)
                end += _align(params[i].numel())
            length = end
            if not buckets:
                extras_offset = end
                end += _align(len(SCALARS) + len(params) + NUM_PER_SLOT * num_slots)
                length = end + sum(_align(-(-size // 4)) for size in raw_sizes)
            buckets.append(Bucket(dtype, members, tuple(offsets), end, length))
        shapes = tuple(p.shape for p in params)
        return cls(devices.pop(), shapes, tuple(buckets), extras_offset, raw_sizes, num_slots)

    @property
    def send_order(self) -> list[int]:
        """Return the buckets in the order in which their gradients are complete, as far as the model's order tells."""
        rest = range(1, len(self.buckets))
        return [*sorted(rest, key=lambda i: self.buckets[i].params[0], reverse=True), 0]

    def chunk(self, bucket: Bucket, size: int) -> int:
        """Elements of a bucket that each of ``size`` workers owns; the last chunks may reach past the end."""
        return _align(-(-bucket.length // size))


class Flat:
    """One copy of all buckets. Views of it: ``grads`` per parameter, ``numbers`` (``scalars``, then ``used`` per
    parameter), per slot ``notes`` and ``times`` (two rows: computation, data), and ``raw`` bytes per buffer."""

    def __init__(self, layout: FlatLayout, max_size: int, zeros: Callable[[int, torch.dtype], Tensor]) -> None:
        self.layout = layout
        self.max_size = max_size
        self.tensors = [zeros(layout.chunk(b, max_size) * max_size + ALIGN * max_size, b.dtype) for b in layout.buckets]
        self.grads: list[Tensor] = [torch.empty(0)] * len(layout.shapes)
        for bucket, tensor in zip(layout.buckets, self.tensors, strict=True):
            for i, offset in zip(bucket.params, bucket.offsets, strict=True):
                shape = layout.shapes[i]
                self.grads[i] = tensor[offset : offset + shape.numel()].view(shape)
        first = self.tensors[0]
        start = layout.extras_offset
        self.numbers = first[start : start + len(SCALARS) + len(layout.shapes)]
        self.scalars, self.used = self.numbers.split([len(SCALARS), len(layout.shapes)])
        self.per_slot = first[start + self.numbers.numel() :][: NUM_PER_SLOT * layout.num_slots].view(NUM_PER_SLOT, -1)
        self.notes, self.times = self.per_slot[0], self.per_slot[1:]
        self.raw: list[Tensor] = []
        offset = layout.buckets[0].num_summed
        for size in layout.raw_sizes:
            words = -(-size // 4)
            self.raw.append(first[offset : offset + words].view(torch.uint8)[:size])
            offset += _align(words)

    def summed_grads(self) -> list[Tensor]:
        """Return all gradients, one flat tensor per bucket."""
        found = []
        for bucket, tensor in zip(self.layout.buckets, self.tensors, strict=True):
            if bucket.params:
                end = bucket.offsets[-1] + self.layout.shapes[bucket.params[-1]].numel()
                found.append(tensor[:end])
        return found

    def put_buffers(self, buffers: Sequence[Tensor]) -> None:
        for raw, buffer in zip(self.raw, buffers, strict=True):
            raw.copy_(buffer.detach().reshape(-1).view(torch.uint8))

    def read_buffers(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the buffers that lie here, in the shapes and dtypes of ``like``."""
        # A copy starts at an aligned address; a view of wider elements may not start in the middle of a word.
        return [raw.clone().view(buffer.dtype).view(buffer.shape) for raw, buffer in zip(self.raw, like, strict=True)]

    def get_buffers(self, buffers: Sequence[Tensor]) -> None:
        if buffers:
            foreach_copy_([buffer.detach() for buffer in buffers], self.read_buffers(buffers))


def _cut(
    params: Sequence[Tensor], dtypes: Sequence[torch.dtype], bucket_bytes: int
) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Yield the parameters of each bucket; those of a dtype are cut from behind, so that its first takes the rest."""
    for dtype in dtypes:
        runs: list[list[int]] = [[]]
        size = 0
        for i in reversed([i for i, p in enumerate(params) if p.dtype == dtype]):
            if size >= bucket_bytes:
                runs.append([])
                size = 0
            runs[-1].append(i)
            size += params[i].numel() * params[i].element_size()
        yield from ((dtype, tuple(reversed(run))) for run in reversed(runs))


def _align(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
