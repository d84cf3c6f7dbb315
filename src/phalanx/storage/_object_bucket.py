"""Talks to one bucket: the only module that imports the client library, and the only one that knows its options.

Guarantees: every call ends, after ``Patience.total`` seconds of tries and one request more at most; requests that fail
for a reason that may pass (5xx, connection, time-out) are tried again with growing, jittered pauses; objects appear
complete or not at all, whatever their size. Large ones are sent in parts, several at a time.

Assumption: credentials, region and endpoint are in the environment, under the names that the providers' own tools use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import IO, Any

from phalanx.storage._errors import StorageError, told

ENV_TIMEOUT = "PHALANX_STORAGE_TIMEOUT"
PART = 8 << 20
"""Bytes of a part of an upload, and of a range of a download."""
AT_ONCE = 8
"""Parts or ranges under way at the same time."""
_MOST_PARTS = 9000  # S3 takes 10,000
_CONFIGURED_BY = ("AWS_", "GOOGLE_", "AZURE_", "PHALANX_STORAGE_")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a request may take."""

    total: float = 120.0
    """Seconds after which a request that failed is not tried again."""

    @classmethod
    def from_environment(cls) -> Patience:
        text = os.environ.get(ENV_TIMEOUT, "")
        if not text:
            return cls()
        try:
            total = float(text)
        except ValueError:
            total = 0.0
        if not 0.0 < total < 1e6:
            raise ValueError(f"{ENV_TIMEOUT} is {text!r}; expected a number of seconds above 0")
        return cls(total=total)

    @property
    def request(self) -> float:
        """Seconds that one try may take: a part must get through in this time."""
        return min(60.0, self.total / 2)


@dataclass(frozen=True)
class ObjectBucket:
    """One bucket (container) of a provider, by scheme and name; a value, which may be sent to other processes."""

    scheme: str
    name: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def put(self, key: str, data: bytes | IO[bytes] | Iterable[memoryview], *, size: int, create: bool = False) -> bool:
        """Store an object of ``size`` bytes; with ``create`` only if there is none. Return whether it was stored."""
        import obstore  # optional: the extra [cloud]

        with told(f"{self.url}/{key}", self.scheme, f"writing {size:,} bytes"):
            try:
                if isinstance(data, bytes):
                    obstore.put(self._store(), key, data, mode="create" if create else "overwrite", use_multipart=False)
                else:
                    assert not create, "an object in parts replaces what is there"
                    part = max(PART, -(-size // _MOST_PARTS))
                    obstore.put(self._store(), key, data, chunk_size=part, max_concurrency=AT_ONCE)
            except obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def size(self, key: str) -> int:
        """Return the bytes of an object; ``NotStored`` if there is none."""
        import obstore  # optional: as above

        with told(f"{self.url}/{key}", self.scheme, "asking for its size"):
            return int(obstore.head(self._store(), key)["size"])

    def get(self, key: str) -> bytes:
        import obstore  # optional: as above

        with told(f"{self.url}/{key}", self.scheme, "reading it"):
            return bytes(obstore.get(self._store(), key).bytes())

    def get_range(self, key: str, begin: int, end: int) -> Any:
        """Return the bytes from ``begin`` to before ``end``, as a buffer; all of them, or ``StorageError``."""
        import obstore  # optional: as above

        with told(f"{self.url}/{key}", self.scheme, f"reading bytes {begin:,} to {end:,}"):
            found = obstore.get_range(self._store(), key, start=begin, end=end)
            if len(found) != end - begin:
                raise StorageError(f"{self.url}/{key} ends early: it has no bytes {begin + len(found):,} to {end:,}")
            return found

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield key and size of all objects whose keys lie below ``prefix`` (which ends with no slash)."""
        import obstore  # optional: as above

        with told(f"{self.url}/{prefix}", self.scheme, "listing"):
            for page in obstore.list(self._store(), prefix or None):
                for one in page:
                    yield one["path"], one["size"]

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are fine."""
        import obstore  # optional: as above

        for key in keys:
            with told(f"{self.url}/{key}", self.scheme, "removing it"):
                try:
                    obstore.delete(self._store(), key)
                except FileNotFoundError:
                    pass

    def _store(self) -> Any:
        """Return the client; one for each process and environment, since it has threads and credentials."""
        known = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(_CONFIGURED_BY)))
        if self.scheme == "memory":
            return _make_store(self.scheme, self.name, 0, ())
        return _make_store(self.scheme, self.name, os.getpid(), known)


@lru_cache(maxsize=32)
def _make_store(scheme: str, name: str, process: int, environment: tuple[tuple[str, str], ...]) -> Any:
    from obstore import store  # optional: the extra [cloud]

    if scheme == "memory":
        return store.MemoryStore()
    patience = Patience.from_environment()
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=min(5.0, patience.request)),
            "timeout": timedelta(seconds=patience.request),
            "allow_http": _is_http(dict(environment)),
        },
        "retry_config": {
            "max_retries": 30,
            "retry_timeout": timedelta(seconds=patience.total),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=min(15.0, patience.total / 4)),
                "base": 2,
            },
        },
    }
    with told(f"{scheme}://{name}", scheme, "preparing to connect"):
        if scheme == "s3":
            return store.S3Store(name, **options)
        if scheme == "gs":
            return store.GCSStore(name, **options)
        return store.AzureStore(name, **options)


def _is_http(environment: dict[str, str]) -> bool:
    """Return whether somebody asked for an endpoint without encryption: a server of one's own, say."""
    return any(
        value.startswith("http://") for name, value in environment.items() if "ENDPOINT" in name or "_URL" in name
    )
