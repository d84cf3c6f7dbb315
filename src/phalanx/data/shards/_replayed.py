"""Makes a map-style dataset of a bare iterator, by going through it again from its beginning.

Owns the one iterator of this process. Exact, and expensive: nothing can be skipped, so every process goes through all
samples, also those of others, and a resume through all that were done. Asked for only by name, and said aloud.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset


class ReplayWarning(UserWarning):
    """A dataset is read from its beginning again and again; the message says how often."""


class Replayed(Dataset[Any]):
    """The samples of ``factory()``, which gives the same samples in the same order whenever it is called.

    ``length`` is how many there are; without it they are counted, which reads all of them once. Only ``shuffle=False``
    fits: a step back begins anew.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", ReplayWarning)
    ...     dataset = Replayed(lambda: (n * n for n in range(5)))
    >>> len(dataset), dataset.__getitems__([2, 4]), dataset[1], dataset.num_replays
    (5, [4, 16], 1, 1)
    """

    is_replayed = True

    def __init__(self, factory: Callable[[], Iterable[Any]], length: int | None = None) -> None:
        self.factory = factory
        counted = length is None
        self.length = sum(1 for _ in factory()) if length is None else int(length)
        if self.length < 1:
            raise ValueError(f"the iterator has {self.length} samples; expected at least one")
        self.num_replays = 0
        """How often this process has gone back to the beginning."""
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._pid = os.getpid()
        how = ", which were counted by reading all of them," if counted else ""
        warnings.warn(
            f"a bare iterator of {self.length} samples{how} "
            "is replayed: each worker and each loader process reads all of them in each epoch, and a resume after n "
            "samples reads n before its first. A ShardedDataset reads each once",
            ReplayWarning,
            stacklevel=2,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of a dataset of {self.length}; expected one in [0, {self.length})")
        if self._iterator is None or self._pid != os.getpid() or index < self._next:
            self.num_replays += int(self._iterator is not None and self._pid == os.getpid())
            self._iterator, self._next, self._pid = iter(self.factory()), 0, os.getpid()
        for sample in self._iterator:
            self._next += 1
            if self._next > index:
                return sample
        raise RuntimeError(
            f"the iterator ended after {self._next} samples, but {self.length} were expected: it must give the same "
            "samples whenever it is made. Give the right length=, or leave it out to have them counted"
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples, in the order asked for, read in ascending order."""
        ascending = sorted(set(map(int, indices)))
        found = dict(zip(ascending, map(self.__getitem__, ascending), strict=True))
        return [found[int(index)] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None, "_next": 0}
