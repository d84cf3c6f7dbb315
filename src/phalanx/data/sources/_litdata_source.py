"""Reads datasets that litdata has optimized, through its own package: a source of shards.

Owns the numbers: which chunk holds which samples, from ``index.json``. (``len`` of a litdata dataset is one rank's
share, while its ``[i]`` counts over all; so its ``len`` is never asked.) Chunks with pickled values are refused:
reading them runs code.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data._permutation import Indices
from phalanx.data.shards._shard_source import ShardReader, ShardSource
from phalanx.data.sources._shard_files import fingerprint


class LitDataSource(ShardSource):
    """Samples of a folder that ``litdata.optimize`` wrote. Keyword arguments go to ``litdata.StreamingDataset``.

    >>> source = LitDataSource("optimized")                                                  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        self.folder, self.options = str(folder), options
        about = json.loads((Path(folder) / "index.json").read_bytes())
        chunks, config = about["chunks"], about.get("config") or {}
        formats = [str(name) for name in config.get("data_format") or ()]
        if any("pickle" in name for name in formats):
            raise ValueError(
                f"{folder} holds pickled values (data_format {formats}), which run code when they are read; optimize "
                "it anew with tensors, arrays, text or bytes"
            )
        if (loader := config.get("item_loader")) not in (None, "PyTreeLoader"):
            raise ValueError(f"{folder} is read by {loader}; expected samples as they were written (PyTreeLoader)")
        if options.keys() & {"shuffle", "drop_last", "subsample"}:
            raise ValueError(
                f"options {sorted(options)} change which sample has which number; leave them to the sampler"
            )
        self.names = [str(chunk["filename"]) for chunk in chunks]
        self.sizes: Indices = np.array([chunk["chunk_size"] for chunk in chunks], dtype=np.int64)
        self.starts: Indices = np.concatenate(([0], np.cumsum(self.sizes)))
        words = [fingerprint(json.dumps([chunk, formats], sort_keys=True)) for chunk in chunks]
        self.fingerprints = np.array(words, dtype=np.uint64)
        self._dataset: tuple[int, Any] | None = None
        _litdata()  # absent: better said now than in a loader process

    def name_of(self, shard: int) -> str:
        return self.names[shard]

    def open(self, shard: int) -> ShardReader:
        if self._dataset is None or self._dataset[0] != os.getpid():  # one for all shards that this process reads
            dataset = _litdata().StreamingDataset(self.folder, shuffle=False, **self.options)
            self._dataset = os.getpid(), dataset
        return _LitDataReader(self._dataset[1], int(self.starts[shard]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}


def _litdata() -> Any:
    try:
        return importlib.import_module("litdata")
    except ImportError as error:
        raise ImportError("litdata's format is read by its own package; install it: pip install litdata") from error


class _LitDataReader(ShardReader):
    def __init__(self, dataset: Any, first: int) -> None:
        self.dataset, self.first = dataset, first

    def read(self, offsets: Sequence[int]) -> list[Any]:
        return [self.dataset[self.first + offset] for offset in offsets]

    def close(self) -> None:
        self.dataset = None
