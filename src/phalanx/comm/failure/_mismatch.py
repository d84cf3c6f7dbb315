"""Catches ranks that call different collectives (``PHALANX_DEBUG=collectives``), instead of hanging.

Owns the check: before each collective every rank writes what it is about to do into the store and reads what the
others wrote for the same number; a difference raises ``CollectiveMismatch`` on every rank with a table of who called
what, and a rank that never comes is named when the timeout passes. Slow (a store round trip per rank and call) and
meant for debugging only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx.errors import CollectiveMismatch, PeerTimeout, StoreTimeout

if TYPE_CHECKING:
    from phalanx.comm.stores import Store

# Ranks may differ in shape here; the rest must agree on all shapes.
_UNEVEN = frozenset({"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter"})
_POINT_TO_POINT = frozenset({"send", "recv"})


def collectives_checked() -> bool:
    """Return whether the environment asks for the check."""
    return "collectives" in os.environ.get("PHALANX_DEBUG", "").split(",")


def signature(name: str, sides: Sequence[Tensor | Sequence[Tensor]], op: str, root: int | None = None) -> str:
    """Return what must be the same on every rank, as a person would read it."""
    tensors = [tensor for side in sides for tensor in ([side] if isinstance(side, Tensor) else side)]
    parts = [str(tensors[0].dtype).removeprefix("torch.")] if tensors else []
    if tensors and name not in _UNEVEN:
        parts.append(str(list(tensors[0].shape)))
    if op:
        parts.append(op)
    if root is not None:
        parts.append(f"root {root}")
    return f"{name}({', '.join(parts)})"


class CallChecker:
    """Compares each collective of a group across its ranks before it starts."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = store.namespace("calls")
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._count = 0

    def for_subgroup(self, members: tuple[int, ...], key: str) -> CallChecker:
        return CallChecker(self._store.namespace(key), members.index(self._rank), len(members), self._timeout)

    def check(self, name: str, sides: Sequence[Tensor | Sequence[Tensor]], op: str, root: int | None) -> None:
        if name in _POINT_TO_POINT:
            return
        number, self._count = self._count, self._count + 1
        mine = signature(name, sides, op, root)
        self._store.set(f"{number}/{self._rank}", json.dumps(mine).encode())
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        try:
            calls = [json.loads(data) for data in self._store.wait(keys, timeout=self._timeout)]
        except StoreTimeout:
            found = self._store.get_many(keys)
            missing = tuple(rank for rank, data in enumerate(found) if data is None)
            table = self._table({rank: json.loads(data) for rank, data in enumerate(found) if data is not None})
            raise PeerTimeout(
                f"rank {self._rank}: collective number {number} was not called by ranks {list(missing)} within "
                f"{self._timeout:g} s; the others called\n{table}",
                ranks=missing,
            ) from None
        if number:
            self._store.delete(f"{number - 1}/{self._rank}")  # all ranks have passed it
        if len(set(calls)) > 1:
            raise CollectiveMismatch(
                f"rank {self._rank}: the ranks called different collectives as number {number}:\n"
                f"{self._table(dict(enumerate(calls)))}\nAll ranks must call the same ones in the same order"
            )

    @staticmethod
    def _table(calls: dict[int, str]) -> str:
        return "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(calls.items()))
