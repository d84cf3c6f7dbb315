"""Views that could not be views: a view operation that had to move data gives a copy, and says so when it matters.

Owns the mark on such copies, which views of them inherit. Where an index leads from the copy back to its base, what is
written to the copy is written to the base as well; other copies raise when written to. Reading a copy after its base
was written otherwise raises (it would be out of date). Everything else works as on a view. Tensors of inference mode
have no version, so of theirs only writes are caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.tensor.ops._registry import OPERATORS
from phalanx.tensor.redistribute._traced import TRACED

if TYPE_CHECKING:
    from phalanx.tensor.core._dtensor import DTensor


_RESHAPED = object()  # stands for an index: all elements in their order


class CopiedView:
    """Set as ``_copied_view`` on a copied view: the version that its base has now, and had then.

    ``base[key]`` is what the copy stands for; without a base the copy is read-only. ``strides``: of the view that it
    would have been, None if not known.
    """

    __slots__ = ("base", "counter", "key", "op", "strides", "version")

    def __init__(self, counter: Tensor | None, op: str) -> None:
        self.op = op
        self.counter = counter
        self.version = 0 if counter is None else counter._version
        self.base: DTensor | None = None
        self.key: Any = None
        self.strides: tuple[int, ...] | None = None

    def read_only(self) -> CopiedView:
        """Return the mark for an alias whose writes must not be seen by autograd, as those to the copy are."""
        alias = CopiedView(self.counter, self.op)
        alias.version, alias.strides = self.version, self.strides
        return alias


def mark_copied_view(
    view: Any,
    base: DTensor,
    op: str,
    args: tuple[Any, ...] = (),
    strides: tuple[int, ...] | None = None,
) -> None:
    """``view`` is a copy of a part of ``base``, or of what ``base`` is a copy of; ``args`` were the operation's."""
    if type(base._local) in TRACED:
        raise NotImplementedError(
            f"{op} of {base._spec!r} has to be copied, which no graph of torch.compile can keep in mind: "
            f"it runs outside of them"
        )
    above: CopiedView | None = base._copied_view
    if above is not None:
        mark = above.read_only()
    else:
        local, counter = base._local, None
        if not local.is_inference():
            # An alias counts with its base, and outlives it; emptied, it keeps the count and none of the memory.
            counter = local.detach()
            counter.data = torch.empty(0, dtype=local.dtype, device=local.device)
        mark = CopiedView(counter, op)
    mark.key, mark.strides = _index_of(op, base.ndim, args), strides
    if mark.key is not None:
        mark.base = base
    view._copied_view = mark


def _index_of(op: str, ndim: int, args: tuple[Any, ...]) -> Any:
    """Return the index that selects what a view operation does; None if it is not of that kind."""
    if OPERATORS[op].aliasing == "if_needed" and args:
        return _RESHAPED
    if op == "__getitem__" and len(args) == 2:
        return args[1]
    if (op, len(args)) not in (("select", 3), ("narrow", 4)) or any(type(a) is not int for a in args[1:]):
        return None
    dim, start = args[1] % ndim, args[2]
    if op == "select":
        return (*[slice(None)] * dim, start)
    start += 0 if start >= 0 else args[0].shape[dim]
    return (*[slice(None)] * dim, slice(start, start + args[3]))


def checked_local(tensor: DTensor) -> Tensor:
    """Return the local of ``tensor``, if it is what it should be."""
    if tensor._copied_view is not None:
        check_up_to_date(tensor)
    return tensor._local


def check_up_to_date(view: DTensor) -> None:
    """Raise if the base was written since the copy was made."""
    mark: CopiedView = view._copied_view
    if mark.counter is not None and mark.counter._version != mark.version:
        raise RuntimeError(
            f"this {mark.op} of a DTensor had to be copied ({view._spec!r}), and its base was written since: "
            f"its values are out of date. Take the view again after the write"
        )


def check_writable(view: DTensor, op: str, *, anywhere: bool = True) -> None:
    """Raise if ``op`` would write to a copy that stands for a view and has no way back to its base.

    ``anywhere=False``: raise for every such copy.
    """
    mark: CopiedView | None = view._copied_view
    if mark is None:
        return
    if mark.base is None or not anywhere:
        raise RuntimeError(
            f"{op} would write to a {mark.op} of a DTensor that had to be copied ({view._spec!r}): the write would not "
            f"reach its base. Write to the base, or clone() first"
        )
    check_up_to_date(view)
    check_writable(mark.base, op)


def written(view: DTensor) -> None:
    """``view`` was written to in place: so is its base, if the view is a copy."""
    mark: CopiedView | None = view._copied_view
    if mark is not None and mark.base is not None:
        if mark.key is _RESHAPED:
            mark.base.copy_(view.reshape(mark.base.shape))
        else:
            mark.base[mark.key] = view
        if mark.counter is not None:
            mark.version = mark.counter._version
