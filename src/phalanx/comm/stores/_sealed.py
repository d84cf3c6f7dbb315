"""Shows a store through a job's signature: what is written is signed, what is read is verified.

Owns the view that agents and workers have of a job's namespace. With a secret, a value that is not signed with it reads
as absent, is named in the log once, and does not stand in the way of the rightful writer: ``compare_and_set`` from
absent replaces it. Without a secret values pass through as they are, except that a signed one is an error (this process
was not given the secret). Counters are signed too, so ``add`` is a compare-and-set here; one that a stranger overwrote
or deleted begins again at 0, so a count may only ever be a reason to look at records. What process groups exchange by
``as_c10d`` is signed like the rest. Nothing here keeps a stranger with write access from deleting keys, nor from
writing an old record of a key to that key again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.comm.stores._complaints import clipped
from phalanx.comm.stores._counter import make_way, parse_counter
from phalanx.comm.stores._interface import Change, Lease, Store, Watch
from phalanx.comm.stores._namespace import NamespacedStore
from phalanx.comm.stores._polling import wait_for_keys
from phalanx.comm.stores._signing import Signer, read_secret
from phalanx.protocol import job_prefix

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub


def job_store(root: Store, job: str) -> Store:
    """Return the namespace of ``job`` in ``root``, signed with the secret that the environment names, if any.

    >>> job_store(MemoryStore(), "job7").set("wish/node1", b"4")       # doctest: +SKIP
    """
    return SealedStore(root.namespace(job_prefix(job)), Signer(job, read_secret()))


def signed_store(root: Store, job: str) -> Store:
    """Return the whole of ``root``, signed with the same secret: where the groups of a job meet."""
    return SealedStore(root, Signer(job, read_secret()))


class SealedStore(Store):
    """``below`` with every value signed and verified by ``signer``; ``below`` is in the job's namespace."""

    def __init__(self, below: Store, signer: Signer) -> None:
        self._below = below
        self._signer = signer
        self.address = below.address
        self.pushes = below.pushes

    def _seal(self, key: str, value: bytes) -> bytes:
        return self._signer.seal(key, value)

    def _open(self, key: str, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        if not self._signer.has_secret:
            return self._signer.open(key, value)
        return self._signer.open_trusted(key, value)

    def get(self, key: str) -> bytes | None:
        return self._open(key, self._below.get(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._open(key, value) for key, value in zip(keys, self._below.get_many(keys), strict=True)]

    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        self._below.set(key, self._seal(key, value), lease=lease)

    def set_many(self, values: Mapping[str, bytes]) -> None:
        self._below.set_many({key: self._seal(key, value) for key, value in values.items()})

    def add(self, key: str, amount: int = 1) -> int:
        """As below, but a counter that holds no number, whoever wrote that, is named and begins again."""
        if not self._signer.has_secret:
            try:
                return self._below.add(key, amount)
            except ValueError:
                pass  # no number
        for num_tries in itertools.count(1):
            standing = self._below.get(key)
            total = self._number(key, standing) + amount
            if self._below.compare_and_set(key, standing, self._seal(key, b"%d" % total)):
                break
            make_way(num_tries)
        return total

    def count(self, key: str) -> int:
        """Return what a counter holds; 0 when there is none, or no number that can be trusted."""
        return self._number(key, self._below.get(key))

    def _number(self, key: str, standing: bytes | None) -> int:
        if standing is None:
            return 0
        value = self._signer.open_trusted(key, standing) if self._signer.has_secret else standing
        number = None if value is None else parse_counter(value)
        if number is None and value is not None:
            self._signer.complain(key, f"refused a counter: {key!r} holds {clipped(value)}, not a number")
        return number or 0

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        sealed = self._seal(key, value)
        if expected is not None:
            return self._below.compare_and_set(key, self._seal(key, expected), sealed)
        while True:
            if self._below.compare_and_set(key, None, sealed):
                return True
            standing = self._below.get(key)
            if self._open(key, standing) is not None:
                return False
            if standing is not None and self._below.compare_and_set(key, standing, sealed):
                return True  # a stranger's

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        until = time.monotonic() + timeout
        opened = [self._open(key, value) for key, value in zip(keys, self._below.wait(keys, timeout), strict=True)]
        found = [value for value in opened if value is not None]
        if len(found) == len(keys):
            return found
        # Some are a stranger's: the store below cannot tell, so look for the right ones ourselves.
        return wait_for_keys(self.get_many, keys, max(0.0, until - time.monotonic()), self.address)

    def delete(self, key: str) -> bool:
        return self._below.delete(key)

    def items(self, prefix: str = "") -> dict[str, bytes]:
        opened = {key: self._open(key, value) for key, value in self._below.items(prefix).items()}
        return {key: value for key, value in opened.items() if value is not None}

    def watch(self, prefix: str = "") -> Watch:
        return _SealedWatch(self._below.watch(prefix), self)

    def lease(self, ttl: float) -> Lease:
        return self._below.lease(ttl)

    def namespace(self, prefix: str) -> Store:
        return NamespacedStore(self, prefix)

    def clone(self) -> Store:
        return SealedStore(self._below.clone(), self._signer)

    def as_c10d(self, prefix: str = "") -> C10dStore:
        native = self._below.as_c10d(prefix)
        if not self._signer.has_secret:
            return native
        from phalanx.comm.stores._for_torch import StoreForTorch, for_torch  # start-up: it imports torch

        assert isinstance(native, StoreForTorch), "every store of ours makes one"
        return for_torch(SealedStore(native.store, self._signer), native.prefix)

    def close(self) -> None:
        self._below.close()


class _SealedWatch(Watch):
    """A record that is refused is not a change."""

    def __init__(self, below: Watch, store: SealedStore) -> None:
        self._below = below
        self._store = store

    def wait(self, timeout: float) -> list[Change]:
        until = time.monotonic() + timeout
        while True:
            raw = self._below.wait(max(0.0, until - time.monotonic()))
            kept = []
            for change in raw:
                value = self._store._open(change.key, change.value)
                if value is not None or change.value is None:
                    kept.append(Change(change.key, value))
            if kept or not raw:
                return kept

    def close(self) -> None:
        self._below.close()
