"""Reads Parquet files through pyarrow, row group by row group: a source of shards.

Owns the step from columns to samples. A shard is a row group: the smallest part of a Parquet file that decodes alone.
Nothing is imported before a source is made; readers decode with one thread, in the process that opened them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phalanx.data._permutation import Indices
from phalanx.data.shards._shard_source import ShardReader
from phalanx.data.sources._node_cache import NodeCache
from phalanx.data.sources._shard_files import Fetch, FileSource, ShardFiles, fingerprint


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "Parquet files are read with pyarrow; install it: pip install 'phalanx-train[parquet]'"
        ) from error
    return importlib.import_module("pyarrow")


class ParquetSource(FileSource):
    """Rows of Parquet files as dicts by column: numbers as Python has them, lists of numbers as numpy arrays.

    ``columns`` reads only these. With small row groups (some thousand rows) samples are mixed better and less is held
    in memory: a worker holds slots x window row groups.

    >>> source = ParquetSource(sorted(Path("train").glob("*.parquet")), columns=["tokens"])  # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        cache: NodeCache | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        pyarrow = _pyarrow()
        self.files = ShardFiles(paths, cache, fetch)
        self.columns = None if columns is None else list(columns)
        sizes: list[int] = []
        words: list[int] = []
        where: list[tuple[int, int]] = []
        for number in range(len(self.files)):
            with self.files.open(number) as file:
                footer = _footer(file, self.files.name_of(number))
                file.seek(0)
                metadata = pyarrow.parquet.read_metadata(file)
                self._check_columns(metadata.schema.to_arrow_schema().names, number)
            for group in range(metadata.num_row_groups):
                sizes.append(metadata.row_group(group).num_rows)
                words.append(fingerprint(self.files.name_of(number), group, footer))
                where.append((number, group))
        self.sizes: Indices = np.array(sizes, dtype=np.int64)
        self.fingerprints = np.array(words, dtype=np.uint64)
        self.where = where

    def _check_columns(self, names: Sequence[str], number: int) -> None:
        missing = [column for column in self.columns or () if column not in names]
        if missing:
            name = self.files.name_of(number)
            raise ValueError(f"{name} has no column {missing[0]!r}; it has {', '.join(names)}")

    def file_of(self, shard: int) -> int:
        return self.where[shard][0]

    def name_of(self, shard: int) -> str:
        number, group = self.where[shard]
        return f"{self.files.name_of(number)} (row group {group})"

    def open(self, shard: int) -> ShardReader:
        number, group = self.where[shard]
        with self.files.open(number) as file:
            # One thread: this may be a forked process, in which pyarrow's threads do not live.
            parquet = _pyarrow().parquet.ParquetFile(file)
            table = parquet.read_row_group(group, columns=self.columns, use_threads=False)
        return _ParquetReader(table)


def _footer(file: BinaryIO, name: str) -> bytes:
    """Return the metadata at the end of a file: it changes with whatever stands in the file."""
    length = file.seek(0, 2)
    file.seek(max(0, length - 8))
    tail = file.read(8)
    size = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] not in (b"PAR1", b"PARE") or size + 8 > length:
        raise ValueError(f"{name} is no Parquet file, or was cut off: its last bytes are {tail!r}")
    file.seek(length - 8 - size)
    return file.read(size) + length.to_bytes(8, "little")


class _ParquetReader(ShardReader):
    def __init__(self, table: Any) -> None:
        self.table = table

    def read(self, offsets: Sequence[int]) -> list[Any]:
        taken = self.table.take(list(offsets))
        columns = [_values(taken.column(number)) for number in range(taken.num_columns)]
        names = taken.column_names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        self.table = None


def _values(column: Any) -> Sequence[Any]:
    """Return a column's values; lists of numbers as arrays, since Python's lists of them take a hundred times
    longer."""
    types = _pyarrow().types
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if (
        not is_list
        or column.null_count
        or not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    ):
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types here
    rows = column.combine_chunks()
    if hasattr(rows, "chunks"):  # a column of no chunk or several
        rows = rows.chunk(0) if rows.num_chunks == 1 else None
    if rows is None or rows.flatten().null_count:
        return column.to_pylist()  # type: ignore[no-any-return]  # as above
    edges = rows.offsets.to_numpy() - rows.offsets[0].as_py()
    values = rows.flatten().to_numpy(zero_copy_only=False)
    return [values[first:stop].copy() for first, stop in itertools.pairwise(edges)]
