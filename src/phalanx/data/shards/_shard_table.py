"""Lists the shards of a dataset: how many samples each has, and by what it is recognized.

Owns the numbering of samples (shard after shard, in the order given) and the check that a saved position belongs to the
same shards. A value: nothing is opened here. Of each shard a state keeps 24 bits, so that one that was changed can be
named, and of all together a digest, which decides.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data._permutation import Indices

Words = npt.NDArray[np.uint64]


class ShardTable:
    """The shards of a dataset, of ``sizes`` samples each; empty ones are allowed.

    ``fingerprints`` has a 64-bit word for each shard that changes when the shard does, ``name_of`` gives a shard's
    name.

    >>> table = ShardTable([3, 0, 2])
    >>> table.length, [array.tolist() for array in table.locate(np.array([0, 2, 3, 4]))]
    (5, [[0, 0, 2, 2], [0, 2, 0, 1]])
    """

    def __init__(
        self,
        sizes: Sequence[int] | npt.NDArray[Any],
        fingerprints: Words | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self.sizes: Indices = np.array(sizes, dtype=np.int64)
        if self.sizes.ndim != 1 or (self.sizes < 0).any():
            raise ValueError("sizes of shards must be in one dimension, and none below 0")
        self.starts: Indices = np.concatenate(([0], np.cumsum(self.sizes)))
        self.length = int(self.starts[-1])
        if self.length < 1:
            raise ValueError(f"the {self.sizes.size} shards are empty; expected at least one sample")
        words = np.zeros(self.sizes.size, np.uint64) if fingerprints is None else np.asarray(fingerprints, np.uint64)
        if words.shape != self.sizes.shape:
            raise ValueError(f"{words.size} fingerprints for {self.sizes.size} shards; expected one for each")
        self._words = words
        self._name_of = name_of

    @property
    def num_shards(self) -> int:
        return int(self.sizes.size)

    def name_of(self, shard: int) -> str:
        """Return what people know the shard by."""
        return f"shard {shard}" if self._name_of is None else self._name_of(shard)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the shard of each sample and its place in there."""
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        return shards, indices - self.starts[shards]

    @functools.cached_property
    def digest(self) -> str:
        """What all shards together are recognized by."""
        text = np.stack([self.sizes.astype(np.uint64), self._words]).tobytes()
        return hashlib.blake2b(text, digest_size=16, person=b"phalanx.shards").hexdigest()

    @functools.cached_property
    def marks(self) -> str:
        """24 bits of each shard, as text: enough to name one that was changed."""
        return base64.b64encode(self._mark_bytes().tobytes()).decode()

    def _mark_bytes(self) -> npt.NDArray[np.uint8]:
        # One multiplication spreads size and word over the upper bits, of which three bytes are kept.
        words = (self._words ^ (self.sizes.astype(np.uint64) << np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        marks: npt.NDArray[np.uint8] = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, 5:]
        return marks

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of other shards than these, by the names of those that were changed."""
        if saved.get("digest") == self.digest:
            return
        try:
            marks = np.frombuffer(base64.b64decode(str(saved["marks"]), validate=True), np.uint8).reshape(-1, 3)
        except (KeyError, ValueError):
            raise ValueError("sampler state has no readable marks of its shards; it is damaged") from None
        common = min(len(marks), self.num_shards)
        changed = np.flatnonzero((marks[:common] != self._mark_bytes()[:common]).any(axis=1))
        names = ", ".join(self.name_of(int(shard)) for shard in changed[:5])
        more = f" and {changed.size - 5} more" if changed.size > 5 else ""
        said = f"changed since then: {names}{more}" if changed.size else "none of the first ones differs by its mark"
        if len(marks) != self.num_shards:
            said = f"it had {len(marks)} shards and there are {self.num_shards} now; {said}"
        raise ValueError(
            f"sampler state is of other shards: {said}. Positions would mean other samples. Put the shards back as "
            "they were when it was saved, or begin a new run"
        )
