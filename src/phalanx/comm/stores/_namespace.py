"""Shows a store under a prefix.

Owns the translation of keys and nothing else: every call goes to the store below with ``prefix/`` in front,
and the prefix is taken off again from what comes back. Leases are not keys and pass through untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.comm.stores._interface import Change, Lease, Store, Watch

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub


class NamespacedStore(Store):
    """``root`` under ``prefix/``. Made by ``Store.namespace``; closing it leaves ``root`` open."""

    def __init__(self, root: Store, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError(f"a namespace needs a name, got {prefix!r}")
        self._root = root
        self._prefix = prefix.strip("/") + "/"
        self.address = root.address
        self.pushes = root.pushes

    def __repr__(self) -> str:
        return f"<{type(self._root).__name__} {self.address} under {self._prefix!r}>"

    def get(self, key: str) -> bytes | None:
        return self._root.get(self._prefix + key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._root.get_many([self._prefix + key for key in keys])

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        self._root.set(self._prefix + key, value, lease=lease)

    def set_many(self, values: Mapping[str, bytes]) -> None:
        self._root.set_many({self._prefix + key: value for key, value in values.items()})

    def add(self, key: str, amount: int = 1) -> int:
        return self._root.add(self._prefix + key, amount)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        return self._root.compare_and_set(self._prefix + key, expected, value)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        return self._root.wait([self._prefix + key for key in keys], timeout)

    def delete(self, key: str) -> bool:
        return self._root.delete(self._prefix + key)

    def items(self, prefix: str = "") -> dict[str, bytes]:
        below = self._root.items(self._prefix + prefix)
        return {key[len(self._prefix) :]: value for key, value in below.items()}

    def watch(self, prefix: str = "") -> Watch:
        return _NamespacedWatch(self._root.watch(self._prefix + prefix), len(self._prefix))

    def lease(self, ttl: float) -> Lease:
        return self._root.lease(ttl)

    def namespace(self, prefix: str) -> Store:
        if not prefix.strip("/"):
            raise ValueError(f"a namespace needs a name, got {prefix!r}")
        return NamespacedStore(self._root, self._prefix + prefix.strip("/"))

    def clone(self) -> Store:
        return _OwningNamespace(self._root.clone(), self._prefix)

    def as_c10d(self, prefix: str = "") -> C10dStore:
        return self._root.as_c10d(self._prefix + prefix)

    def close(self) -> None:
        """Nothing: the connection belongs to the store that this is a view of."""


class _OwningNamespace(NamespacedStore):
    """A clone of a namespace made its own connection, so closing it closes that."""

    def close(self) -> None:
        self._root.close()


class _NamespacedWatch(Watch):
    def __init__(self, below: Watch, cut: int) -> None:
        self._below = below
        self._cut = cut

    def wait(self, timeout: float) -> list[Change]:
        return [Change(change.key[self._cut :], change.value) for change in self._below.wait(timeout)]

    def close(self) -> None:
        self._below.close()
