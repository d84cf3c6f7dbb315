"""Reads, shows and converts what was saved: by a job, by ``shard.save``, by torch, by Hugging Face's tools."""

from __future__ import annotations

from phalanx.checkpoint._export import FORMATS, export
from phalanx.checkpoint._inspect import Contents, TensorRow, inspect
from phalanx.checkpoint._open import load
from phalanx.shard import CheckpointError

__all__ = ["FORMATS", "CheckpointError", "Contents", "TensorRow", "export", "inspect", "load"]
