"""Reads tar files of the WebDataset format, any sample at once: a source of shards.

Owns readers of one tar file each. Which members make a sample is ``_tar_index``'s matter; content is handed out as
bytes, never unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.shards._shard_source import ShardReader
from phalanx.data.sources._node_cache import NodeCache
from phalanx.data.sources._shard_files import Fetch, FileReader, FileSource, ShardFiles, fingerprint
from phalanx.data.sources._tar_index import IndexFolder, TarIndex

#: Where indexes are kept, beside the files.
FOLDER = ".phalanx-index"
#: Bytes of headers that may stand between two fields of a sample for both to be read at once.
_BETWEEN = 4096


class TarSource(FileSource):
    """Samples of tar files: ``{"__key__": "000017", "jpg": b"...", "cls": b"7"}``, as WebDataset groups them.

    An index is made at the first use and kept in ``index``: by default beside the files, or, where nothing can be
    written there, under the user's cache folder. ``.tar.gz`` files are unpacked into ``cache``; ``fetch(path, target)``
    brings files there that are elsewhere.

    >>> source = TarSource(sorted(Path("train").glob("*.tar")))                             # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        index: str | Path | None = None,
        cache: NodeCache | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        self.files = ShardFiles(paths, cache, fetch)
        self.indexes = IndexFolder(self.files, _index_folder(self.files, index))
        self.sizes, words = self.indexes.summary()
        self.fingerprints = words

    def open(self, shard: int) -> ShardReader:
        index = self.indexes.read(shard)
        if index.word != self.fingerprints[shard]:
            raise ValueError(
                f"{self.name_of(shard)} was changed while it was in use; begin again with the shards as they are"
            )
        return _TarReader(self.files.open(shard), self.name_of(shard), index)


def _index_folder(files: ShardFiles, given: str | Path | None) -> Path:
    """Return a folder that can be written to, made if need be."""
    if given is not None:
        wanted = [Path(given)]
    else:
        home = Path(os.path.expanduser("~/.cache/phalanx")) / f"index-{fingerprint(*files.paths):016x}"
        beside = [Path(files.paths[0]).parent / FOLDER] if files.fetch is None else []
        wanted = [*beside, home]
    for folder in wanted:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise PermissionError(
        f"an index of the tar files can be written to none of {', '.join(map(str, wanted))}; give index= a folder"
    )


class _TarReader(FileReader):
    def __init__(self, file: BinaryIO, name: str, index: TarIndex) -> None:
        super().__init__(file, name)
        self.keys = index.keys
        self.starts = index.starts.tolist()
        fields = [index.fields[kind] for kind in index.kinds.tolist()]
        self.fields = list(zip(fields, index.offsets.tolist(), index.lengths.tolist(), strict=True))

    def sample(self, offset: int) -> dict[str, Any]:
        key, fields = self.keys[offset], self.fields[self.starts[offset] : self.starts[offset + 1]]
        begin, end = fields[0][1], fields[-1][1] + fields[-1][2]
        found: dict[str, Any] = {"__key__": key}
        if end - begin > sum(count for _, _, count in fields) + _BETWEEN * len(fields):
            for field, first, count in fields:
                found[field] = self.bytes_at(first, count, f"sample {key!r}")
            return found
        # Mostly fields stand one after the other, with headers between them: one call of the system for all.
        data = memoryview(self.bytes_at(begin, end - begin, f"sample {key!r}"))
        for field, first, count in fields:
            found[field] = bytes(data[first - begin : first - begin + count])
        return found
