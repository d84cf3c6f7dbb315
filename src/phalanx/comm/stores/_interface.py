"""Defines what every store offers: a small, strongly consistent map from text keys to bytes.

Owns the interface only. Guarantees that all implementations give: ``add`` and ``compare_and_set`` are
atomic across clients; a ``set`` that returned is seen by every later ``get``; a key bound to a lease
vanishes at most ``ttl`` seconds (plus the store's own granularity) after the last refresh, whatever
happened to its owner; a store that cannot be reached raises ``StoreLost`` with its address and never hangs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store as C10dStore  # torch.distributed's, with its stub
    from typing_extensions import Self  # in typing from 3.11 on


@dataclass(frozen=True)
class Change:
    """One observed change of a key: its new value, or None when it was deleted or its lease ran out."""

    key: str
    value: bytes | None


class Lease(ABC):
    """A time-to-live that keys can be bound to. Refresh it more often than every ``ttl`` seconds.

    Its calls never wait behind a blocking call on the store that made it.
    """

    ttl: float

    @abstractmethod
    def refresh(self) -> bool:
        """Start the time-to-live anew. False when it has run out already (its keys are gone)."""

    @abstractmethod
    def revoke(self) -> None:
        """Give it up at once; its keys vanish."""


class Watch(ABC):
    """Changes under a prefix since the watch was made; use as a context manager.

    Changes of one key come in order and the last one is never missed; a store that has to look for changes
    may merge several quick ones of one key into the last. After an error, make a new watch and read
    ``items`` again.
    """

    @abstractmethod
    def wait(self, timeout: float) -> list[Change]:
        """Block until there is at least one change; an empty list after ``timeout`` seconds."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(ABC):
    """A key-value store shared by the processes of a job; use it as a context manager to close it.

    >>> store = MemoryStore()                      # doctest: +SKIP
    >>> store.set("job/7/host", b"node1")          # doctest: +SKIP
    >>> store.namespace("job/7").get("host")       # doctest: +SKIP
    b'node1'

    One client may be used by several threads, but a blocking call may delay the others: see ``clone``.
    """

    address: str
    """Where the store is, as a person would write it; every error names it."""
    pushes: bool = False
    """Whether a ``wait`` costs the server nothing while it lasts; else the client asks again and again."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the value now, or None. Never waits for the key to appear."""

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values now, in the order of ``keys``; one round trip where the store allows it."""

    @abstractmethod
    def set(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        """Write a key. It is bound to ``lease`` alone: any write without one unbinds the key from an
        earlier one.

        ``StoreError`` when the lease has run out; nothing is written then.
        """

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Write several keys; one round trip where the store allows it. Others may see some of them before the rest."""
        for key, value in values.items():
            self.set(key, value)

    @abstractmethod
    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter (absent counts as 0) and return the new value.

        A counter's value is its decimal digits (``b"17"``), so ``set`` and ``get`` work on it.
        ``ValueError`` when the key holds something else.
        """

    @abstractmethod
    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Set if the value is ``expected`` (None: if absent). False, and nothing changed, when it is not."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Block until all keys exist and return their values. ``StoreTimeout`` names those that are
        missing.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""

    @abstractmethod
    def items(self, prefix: str = "") -> dict[str, bytes]:
        """Return all keys that start with ``prefix``, with their values, in the order of the keys."""

    @abstractmethod
    def watch(self, prefix: str = "") -> Watch:
        """Start to observe the keys that start with ``prefix``."""

    @abstractmethod
    def lease(self, ttl: float) -> Lease:
        """Return a new lease of ``ttl`` seconds, running from now."""

    @abstractmethod
    def namespace(self, prefix: str) -> Store:
        """Return the same store seen under ``prefix/``: what is written here is invisible outside of it."""

    @abstractmethod
    def clone(self) -> Store:
        """Return a second connection, for another thread: a blocking call on one never delays the other."""

    @abstractmethod
    def as_c10d(self, prefix: str = "") -> C10dStore:
        """Return the same place for torch's process groups; usable until this store is closed.

        What torch writes there lies apart from the keys of this interface. Make a fresh one (by
        ``namespace`` or ``prefix``) for every generation, so that no stale key is ever read.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; later calls raise ``StoreLost``. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
