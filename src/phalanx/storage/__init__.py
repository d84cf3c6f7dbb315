"""Keeps files by URL: in the buckets of S3, Google Cloud Storage and Azure, in memory, or on the disk."""

from __future__ import annotations

from phalanx.storage._errors import NotStored, StorageError
from phalanx.storage._place import Place, as_place
from phalanx.storage._remote_path import RemotePath

__all__ = ["NotStored", "Place", "RemotePath", "StorageError", "as_place"]
