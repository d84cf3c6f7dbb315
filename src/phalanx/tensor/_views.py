"""Views that could not be views: a view operation that had to move data gives a copy, and says so when it matters.

Owns the mark on such copies, which views of them inherit. Writing to one raises (the write would not reach the base);
reading one after its base was written raises too (it would be stale). Everything else works as on a view. Tensors of
inference mode have no version, so of theirs only writes are caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.tensor._dtensor import DTensor


class CopiedView:
    """Set as ``_stale`` on a copied view: the version that its base has now, and had then."""

    __slots__ = ("counter", "op", "version")

    def __init__(self, base: Tensor, op: str) -> None:
        self.op = op
        self.counter: Tensor | None = None
        self.version = 0
        if not base.is_inference():
            # An alias counts with its base, and outlives it; emptied, it keeps the count and none of the memory.
            self.counter = base.detach()
            self.counter.data = torch.empty(0, dtype=base.dtype, device=base.device)
            self.version = base._version


def mark_copied_view(view: Any, base: DTensor, op: str) -> None:
    """``view`` is a copy of a part of ``base``, or of what ``base`` is a copy of."""
    view._stale = base._stale if base._stale is not None else CopiedView(base._local, op)


def fresh(tensor: DTensor) -> Tensor:
    """The local of ``tensor``, if it is what it should be."""
    if tensor._stale is not None:
        check_fresh(tensor)
    return tensor._local


def check_fresh(view: DTensor) -> None:
    """Raise if the base was written since the copy was made."""
    mark: CopiedView = view._stale
    if mark.counter is not None and mark.counter._version != mark.version:
        raise RuntimeError(
            f"this {mark.op} of a DTensor had to be copied ({view._spec!r}), and its base was written since: "
            f"its values are out of date. Take the view again after the write"
        )


def check_writable(view: DTensor, op: str) -> None:
    """Raise if ``op`` would write to a copy that stands for a view."""
    mark: CopiedView | None = view._stale
    if mark is not None:
        raise RuntimeError(
            f"{op} would write to a {mark.op} of a DTensor that had to be copied ({view._spec!r}): the write would not "
            f"reach its base. Write to the base, or clone() first"
        )
