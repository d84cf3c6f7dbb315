"""Shows communication hooks a bucket: a flat tensor of gradients and what belongs to it.

It has the methods of PyTorch's object of the same name, so hooks written for that one work here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from phalanx.ddp.buckets._flat_buffer import views_like
from phalanx.ddp.buckets._local_tensors import local_part


class GradBucket:
    """Gradients of several parameters in one flat tensor.

    >>> def halve(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # doctest: +SKIP
    ...     future = torch.futures.Future()
    ...     future.set_result(bucket.buffer() / 2)
    ...     return future
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        params: Sequence[nn.Parameter],
        *,
        is_last: bool,
        members: Sequence[int] = (),
        space_for_copy: Callable[[torch.dtype], Tensor] | None = None,
        filled_as: torch.dtype | None = None,
    ) -> None:
        """``filled_as``: gradients were written to the copy in this dtype, in place of the buffer."""
        self._index = index
        self._buffer = buffer
        self._params = list(params)
        self._is_last = is_last
        self._members = tuple(members)
        self._space_for_copy = space_for_copy
        self._filled_as = filled_as

    def index(self) -> int:
        """Place in the launch order, from 0; stable between steps once buckets have been rebuilt."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat gradients; not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat gradients, e.g. by a compressed copy of as many elements."""
        self._buffer = buffer

    def as_dtype(self, dtype: torch.dtype) -> Tensor:
        """Return the flat gradients in ``dtype``: the buffer itself if it has it, else a copy, in memory of the
        bucket's that is written again in the next step."""
        if self._buffer.dtype is dtype or self._space_for_copy is None:
            return self._buffer.to(dtype)
        space = self._space_for_copy(dtype)
        return space if dtype is self._filled_as else space.copy_(self._buffer)

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer per parameter; of this rank's part of it, if it is distributed."""
        return views_like(self._buffer, list(map(local_part, self._params)))

    def parameters(self) -> list[nn.Parameter]:
        return list(self._params)

    def members(self) -> tuple[int, ...]:
        """Places of the parameters in the module's order: the same on all ranks and in a later run."""
        return self._members

    def is_last(self) -> bool:
        """Return whether it is the last bucket of this step."""
        return self._is_last
