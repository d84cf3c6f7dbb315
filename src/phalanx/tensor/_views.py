"""Views that could not be views: a view operation that had to move data gives a copy, and says so when it matters.

Owns the mark on such copies. Writing to one raises (the write would not reach the base); reading one after its base was
written raises too (it would be stale). Everything else works as on a view.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.tensor._dtensor import DTensor


class CopiedView:
    """Set as ``_stale`` on a copied view: which base, at which version."""

    __slots__ = ("base", "op", "version")

    def __init__(self, base: DTensor, op: str) -> None:
        self.base = weakref.ref(base._local)
        self.version = base._local._version
        self.op = op


def mark_copied_view(view: Any, base: DTensor, op: str) -> None:
    if not base._local.is_inference():
        view._stale = CopiedView(base, op)


def check_fresh(view: DTensor) -> None:
    """Raise if the base was written since the copy was made."""
    mark: CopiedView = view._stale
    base = mark.base()
    if base is not None and base._version != mark.version:
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
