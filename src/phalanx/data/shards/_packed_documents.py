"""Packs documents of tokens into sequences of one length, as a source of shards.

Owns which tokens stand in which sequence. Documents come in blocks (the shards of their dataset, or so many in a row).
Those of a block are put into a keyed order, joined, and cut every ``length`` tokens; what is left at the end of a block
is dropped, or padded. How many sequences a block has does not depend on that order, only on the lengths of its
documents, which must be known (``document_lengths``): so a sequence can be read alone, and packed data has shards,
positions and a resume like any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phalanx.data._permutation import Indices, derive_key, table_permutation
from phalanx.data.shards._shard_source import ShardReader, ShardSource
from phalanx.data.shards._sharded_dataset import ShardedDataset, read_many

#: Documents of a block, where their dataset has no shards.
DEFAULT_BLOCK = 1024


class Packed(ShardSource):
    """Sequences of ``length`` tokens out of documents: a source for ``ShardedDataset``.

    ``documents[i]`` is a row of integers of which there are ``lengths[i]``; ``separator`` is a token to put after each.
    With ``pad`` the last sequence of a block is filled up with that token, so that every token is used; without, up to
    length - 1 tokens of each block are left out.

    >>> source = Packed([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4, lengths=[3, 2, 4], separator=0)
    >>> dataset = ShardedDataset(source)
    >>> len(dataset), sorted(torch.cat([dataset[0], dataset[1], dataset[2]]).tolist())
    (3, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        lengths: Sequence[int] | npt.NDArray[Any],
        separator: int | None = None,
        pad: int | None = None,
        block: int = DEFAULT_BLOCK,
        seed: int = 0,
    ) -> None:
        if length < 1 or block < 1:
            raise ValueError(f"length is {length} and block {block}; expected at least 1 each")
        own = np.array(lengths, dtype=np.int64)
        if own.shape != (len(documents),) or (own < 0).any():
            raise ValueError(
                f"lengths has shape {own.shape} for {len(documents)} documents; expected one each, none < 0"
            )
        self.documents, self.length, self.separator, self.pad, self.seed = documents, length, separator, pad, seed
        self.lengths: Indices = own + (separator is not None)
        if isinstance(documents, ShardedDataset):
            self.edges: Indices = documents.shards.starts
        else:
            self.edges = np.append(np.arange(0, len(documents), block, dtype=np.int64), len(documents))
        tokens = np.diff(np.concatenate(([0], np.cumsum(self.lengths)))[self.edges])
        self.sizes = -(-tokens // length) if pad is not None else tokens // length
        self.fingerprints = np.array([self._fingerprint(number) for number in range(self.sizes.size)], np.uint64)

    def _fingerprint(self, number: int) -> int:
        first, stop = self.edges[number : number + 2].tolist()
        below = self.documents.source.fingerprints[number] if isinstance(self.documents, ShardedDataset) else 0
        text = f"{self.length},{self.separator},{self.pad},{self.seed},{below}|".encode()
        lengths = self.lengths[first:stop].tobytes()
        return int.from_bytes(hashlib.blake2b(text + lengths, digest_size=8).digest(), "little")

    def name_of(self, shard: int) -> str:
        if isinstance(self.documents, ShardedDataset):
            return self.documents.source.name_of(shard)
        return f"documents {self.edges[shard]} to {self.edges[shard + 1] - 1}"

    def open(self, shard: int) -> ShardReader:
        return _PackedReader(self, shard)

    def prepare(self, shard: int) -> None:
        if isinstance(self.documents, ShardedDataset):
            self.documents.source.prepare(shard)

    def expect(self, shards: Sequence[int], upcoming: Sequence[int]) -> None:
        if isinstance(self.documents, ShardedDataset):
            self.documents.source.expect(shards, upcoming)

    def adjust_cache(self, num_shards: int) -> None:
        if isinstance(self.documents, ShardedDataset):
            self.documents.source.adjust_cache(num_shards)


class _PackedReader(ShardReader):
    def __init__(self, packed: Packed, block: int) -> None:
        self.packed = packed
        self.first, stop = packed.edges[block : block + 2].tolist()
        count = stop - self.first
        self.order = table_permutation(derive_key("packing", packed.seed, block), count) if count else np.arange(0)
        lengths = packed.lengths[self.first : stop][self.order]
        #: Where each document begins among the tokens of the block, in the block's order.
        self.edges: Indices = np.concatenate(([0], np.cumsum(lengths)))
        documents = packed.documents
        # The block is a shard of the documents: its reader lives as long as this one.
        self.inner = documents.source.open(block) if isinstance(documents, ShardedDataset) else None

    def read(self, offsets: Sequence[int]) -> list[Any]:
        length = self.packed.length
        spans = []
        for offset in offsets:
            begin, end = offset * length, min((offset + 1) * length, int(self.edges[-1]))
            first = int(np.searchsorted(self.edges, begin, side="right")) - 1
            spans.append((begin, end, range(first, int(np.searchsorted(self.edges, end, side="left")))))
        tokens = self._tokens(sorted({place for _, _, places in spans for place in places}))
        samples = []
        for begin, end, places in spans:
            # Of the first and the last document only a part belongs to the sequence.
            parts = [tokens[p][max(0, begin - self.edges[p]) : end - self.edges[p]] for p in places]
            sample = torch.cat(parts)
            if end - begin < length:
                assert self.packed.pad is not None, "only padded blocks have a short sequence"
                sample = torch.cat([sample, sample.new_full((length - (end - begin),), self.packed.pad)])
            samples.append(sample)
        return samples

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def _tokens(self, places: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the documents at places of the block's order, each with its separator."""
        numbers = [int(self.order[place]) for place in places]
        packed = self.packed
        if self.inner is not None:
            transform = packed.documents.transform
            raw = self.inner.read(numbers)
            raw = raw if transform is None else [transform(document) for document in raw]
        else:
            raw = read_many(packed.documents, [self.first + number for number in numbers])
        found = {}
        for place, number, document in zip(places, numbers, raw, strict=True):
            tokens = torch.as_tensor(document).to(torch.int64)
            if packed.separator is not None:
                tokens = torch.cat([tokens, tokens.new_tensor([packed.separator])])
            if tokens.shape != (packed.lengths[self.first + number],):
                raise ValueError(
                    f"document {self.first + number} has shape {tuple(tokens.shape)} with its separator, but the index "
                    f"of lengths says {packed.lengths[self.first + number]} tokens; count the lengths anew"
                )
            found[place] = tokens
        return found


def document_lengths(documents: Any, path: str | Path | None = None) -> Indices:
    """Count the tokens of every document, by reading all of them once; with ``path``, kept there for the next time.

    >>> document_lengths([[1, 2], [3]]).tolist()
    [2, 1]
    """
    target = None if path is None else Path(path)
    if target is not None and target.exists():
        known: Indices = np.load(target, allow_pickle=False)
        if known.shape == (len(documents),):
            return known
        raise ValueError(f"{target} has lengths of {known.size} documents, but there are {len(documents)}; remove it")
    counted: list[int] = []
    for first in range(0, len(documents), DEFAULT_BLOCK):
        block = range(first, min(first + DEFAULT_BLOCK, len(documents)))
        counted += map(len, read_many(documents, block))
    found = np.array(counted, dtype=np.int64)
    if target is not None:
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp.npy")
        np.save(draft, found, allow_pickle=False)
        os.replace(draft, target)
    return found
