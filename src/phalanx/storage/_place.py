"""Finds out what a user means by a path: a file of this machine, or an object of a bucket."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from phalanx.storage._object_bucket import ObjectBucket
from phalanx.storage._remote_path import RemotePath

Place = Path | RemotePath
"""Where something lies; readers use what both have in common."""

SCHEMES = ("s3", "gs", "az", "memory")
EXTRA = "pip install 'phalanx-train[cloud]'"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)/*(.*)", re.S)
_LOST_SLASH = re.compile(rf"({'|'.join((*SCHEMES, 'file'))}):/(?!/)")


def as_place(path: str | Path | RemotePath) -> Place:
    """Return where a path or URL leads.

    >>> as_place("file:///data/a%20b"), str(as_place("s3://bucket/run/")), as_place("runs/1")
    (PosixPath('/data/a b'), 's3://bucket/run', PosixPath('runs/1'))

    Raises:
        ValueError: a URL of a kind that we do not know, without a bucket, or in a ``Path``, which drops a slash.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, Path):
        if _LOST_SLASH.match(str(path)):
            raise ValueError(f"{path!r} was a URL, and Path dropped a slash of it; pass the URL as text")
        return path
    found = _URL.fullmatch(path)
    if found is None:
        return Path(path)
    scheme, bucket, key = found[1].lower(), found[2], found[3].rstrip("/")
    if scheme == "file":
        if bucket not in ("", "localhost"):
            raise ValueError(f"{path!r} names the machine {bucket!r}; expected file:///path, on this one")
        return Path("/" + unquote(key))
    if scheme not in SCHEMES:
        raise ValueError(f"{path!r} has the scheme {scheme!r}; expected one of file, {', '.join(SCHEMES)}, or a path")
    if not bucket:
        raise ValueError(f"{path!r} names no bucket; expected {scheme}://bucket/path")
    _require_library(path)
    return RemotePath(ObjectBucket(scheme, bucket), key)


def size_of(place: Place) -> int:
    """Return the bytes of a file or object; ``FileNotFoundError`` if there is none."""
    return place.size() if isinstance(place, RemotePath) else place.stat().st_size


def read_range(place: Place, begin: int, num_bytes: int) -> bytes | bytearray:
    """Return bytes of a file or object; fewer where a file ends before."""
    if isinstance(place, RemotePath):
        return place.read_range(begin, num_bytes)
    with open(place, "rb") as opened:
        opened.seek(begin)
        return opened.read(num_bytes)


def _require_library(path: str) -> None:
    try:
        import obstore  # noqa: F401  # optional: the extra [cloud]
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{path!r} is kept by the package obstore, which is not installed: {EXTRA}"
        ) from error
