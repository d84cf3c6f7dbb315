"""Writes down as one number which collective a rank is in, so that ranks in different ones find out.

Matching is by order only; without this a mistake in a program would mix up bytes silently.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from phalanx.comm.transports._interface import ReduceOp

KINDS = (
    "nothing",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
_KIND = {name: number for number, name in enumerate(KINDS)}
_OPS = {op: number + 1 for number, op in enumerate(ReduceOp)}
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES)}
assert len(_DTYPES) <= 128, "the record's field for the dtype is too narrow"


@lru_cache(maxsize=512)
def record(
    kind: str, dtype: torch.dtype = torch.uint8, op: ReduceOp | None = None, root: int = 0, nbytes: int = 0
) -> int:
    """Return the fields that every rank must give alike. ``nbytes`` stays 0 where sizes may differ between ranks."""
    number = _KIND[kind] | (_OPS[op] << 4 if op is not None else 0) | _DTYPE[dtype] << 8 | root << 15 | nbytes << 25
    assert number < 1 << 63, f"{nbytes} bytes are too many for one collective"
    return number


def describe(number: int) -> str:
    """Return a record in words, for error messages."""
    kind, op, dtype = KINDS[number & 15], number >> 4 & 15, _DTYPES[number >> 8 & 127]
    parts = [f"{dtype}"]
    if op:
        parts.append(list(ReduceOp)[op - 1].value)
    parts += [f"root {number >> 15 & 1023}", f"{number >> 25} bytes"]
    return f"{kind}({', '.join(parts)})"
