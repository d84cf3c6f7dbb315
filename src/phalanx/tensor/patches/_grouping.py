"""Grouping of tensors by device and dtype, which torch's optimizers and clipping do below the interception.

Owns the wrapper around torch's function. The wrapper of a DTensor is a meta tensor, so torch would group it as one.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.utils import _foreach_utils

from phalanx.tensor.core._dtensor import DTensor


def install() -> None:
    """Let torch's modules see the device of a DTensor's data. Does it once."""
    plain: Any = _foreach_utils._group_tensors_by_device_and_dtype
    if hasattr(plain, "_phalanx"):
        return

    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        if not any(type(t) is DTensor for tensors in tensorlistlist for t in tensors):
            return plain(tensorlistlist, with_indices)
        return _group(tensorlistlist, with_indices)

    group._phalanx = True  # type: ignore[attr-defined]  # a mark that this was done
    for name in (
        "torch.utils._foreach_utils",
        "torch.optim.optimizer",
        "torch.optim.swa_utils",
        "torch.nn.utils.clip_grad",
    ):
        module: Any = importlib.import_module(name)  # each has imported the function by name
        module._group_tensors_by_device_and_dtype = group


def _group(lists: Any, with_indices: bool) -> dict[Any, Any]:
    kinds = {(t.device, t.dtype) if t is not None else None for t in lists[0]}
    if len(kinds) == 1 and None not in kinds:  # as nearly always
        everything = range(len(lists[0])) if with_indices else ()
        return {kinds.pop(): ([list(tensors) for tensors in lists], list(everything))}
    groups: dict[Any, Any] = {}
    filled = [tensors or [None] * len(lists[0]) for tensors in lists]  # optimizers leave unused lists empty
    for index, column in enumerate(zip(*filled, strict=True)):
        lead = next(t for t in column if t is not None)
        columns, indices = groups.setdefault((lead.device, lead.dtype), ([[] for _ in lists], []))
        for tensors, tensor, given in zip(columns, column, lists, strict=True):
            if given:
                tensors.append(tensor)
        if with_indices:
            indices.append(index)
    return groups
