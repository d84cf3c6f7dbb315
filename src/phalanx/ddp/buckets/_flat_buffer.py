"""Keeps the flat memory of one bucket, and says when it may be written again.

A flat buffer is one tensor: the gradients of the bucket's parameters one after the other, then an optional tail that
carries the metadata of the step. Gradients handed to the user may be views of it, so before a backward pass writes
into a buffer, nobody else may still look at it: ``FlatBufferPool.writable`` takes one that is free of foreign views, or
a new one. This is how gradients cost no copy and yet behave like tensors of their own, and how what ``.grad`` held
before the step survives a step that fails.

With ``aliasing_allowed`` (``gradient_as_bucket_view=True``) the user has said that old gradients may be overwritten:
then only gradients that are still attached to a parameter keep a buffer busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from phalanx._torch_private import storage_address, storage_use_count

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


class FlatBuffer:
    """Flat memory with one view per parameter."""

    def __init__(self, flat: Tensor, params: Sequence[nn.Parameter]) -> None:
        self.flat = flat
        self.views: list[Tensor] = []
        self._offsets: list[int] = []
        offset = 0
        for param in params:
            self._offsets.append(offset)
            self.views.append(view_like(flat, param, offset))
            offset += param.numel()
        self.numel = offset
        self.grads = flat[:offset]
        self.tail = flat[offset:]
        self.places = list(range(len(params)))
        self.stacked = self._stacked(params)
        self._own_references = self._references()

    def _stacked(self, params: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the gradients as what concatenating them along their first dim gives, where that is how they lie."""
        shapes = {param.shape[1:] for param in params}
        if len(shapes) > 1 or not all(param.dim() and param.numel() and param.is_contiguous() for param in params):
            return None
        return self.grads.view(-1, *shapes.pop())

    def fresh_view(self, param: Tensor, place: int) -> Tensor:
        """Return a view to give away: as long as anyone holds it, the buffer counts as looked at."""
        return view_like(self.flat, param, self._offsets[place])

    @property
    def key(self) -> int:
        """Identity of the memory: views of it have the same."""
        return int(storage_address(self.flat.untyped_storage()))

    def has_foreign_views(self) -> bool:
        return self._references() > self._own_references

    def _references(self) -> int:
        return int(storage_use_count(storage_address(self.flat.untyped_storage())))


def view_like(flat: Tensor, param: Tensor, offset: int) -> Tensor:
    """Return a view of ``flat`` with the shape of ``param``, and its strides where these are dense (channels last)."""
    if param.is_contiguous() or not _is_dense(param):
        return flat.narrow(0, offset, param.numel()).view(param.shape)
    return flat.as_strided(param.size(), param.stride(), flat.storage_offset() + offset)


def views_like(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return ``flat`` as one view per parameter, one after the other."""
    views, offset = [], 0
    for param in params:
        views.append(view_like(flat, param, offset))
        offset += param.numel()
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without holes or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class FlatBufferPool:
    """The buffers of one bucket; at most one spare is kept."""

    def __init__(
        self, params: Sequence[nn.Parameter], tail: int, allocate: Allocate, *, aliasing_allowed: bool
    ) -> None:
        self._params = params
        self._tail = tail
        self._allocate = allocate
        self._aliasing_allowed = aliasing_allowed
        self._buffers: list[FlatBuffer] = []
        self._copies: dict[torch.dtype, Tensor] = {}
        self._copy_views: dict[torch.dtype, list[Tensor]] = {}

    def writable(self, busy: Collection[int]) -> FlatBuffer:
        """Return a buffer that may be overwritten. ``busy`` are the keys of memory that gradients in use belong to."""
        for place, buffer in enumerate(self._buffers):
            if buffer.key not in busy and (self._aliasing_allowed or not buffer.has_foreign_views()):
                self._buffers.insert(0, self._buffers.pop(place))
                return buffer
        numel = sum(param.numel() for param in self._params) + self._tail
        flat = self._allocate(numel, self._params[0].dtype, self._params[0].device)
        self._buffers.insert(0, FlatBuffer(flat, self._params))
        del self._buffers[2:]
        return self._buffers[0]

    def space_for_copy(self, dtype: torch.dtype) -> Tensor:
        """Flat memory for the bucket's gradients in another dtype, the same at each call.

        Fresh memory costs more than the copy itself: its pages have to be found, every step.
        """
        if dtype not in self._copies:
            numel = sum(param.numel() for param in self._params)
            self._copies[dtype] = self._allocate(numel, dtype, self._params[0].device)
        return self._copies[dtype]

    def views_of_copy(self, dtype: torch.dtype) -> list[Tensor]:
        """Return ``space_for_copy`` as one view per parameter."""
        if dtype not in self._copy_views:
            self._copy_views[dtype] = views_like(self.space_for_copy(dtype), self._params)
        return self._copy_views[dtype]

    def forget(self) -> None:
        """Drop all memory, e.g. since a collective that never ended may still write to it."""
        self._buffers.clear()
        self._copies.clear()
        self._copy_views.clear()
