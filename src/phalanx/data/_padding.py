"""Pads so that padding can be told from samples: indices of weight 0, and a dataset that hands the weight on.

Owns the mark (a subclass of int, so that datasets need not know of it) and the step from positions to
indices, where padding is wrapped round to the epoch's beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from phalanx.data._order import Order
from phalanx.data._partition import Tail
from phalanx.data._permutation import Indices
from phalanx.data._source import check_indexable


class PaddingIndex(int):
    """An index that only fills up a batch: the sample was, or will be, counted elsewhere.

    >>> PaddingIndex(3) == 3, weight_of(PaddingIndex(3)), weight_of(3)
    (True, 0.0, 1.0)
    """

    __slots__ = ()


def weight_of(index: int) -> float:
    """1.0 for a sample, 0.0 for padding."""
    return 0.0 if isinstance(index, PaddingIndex) else 1.0


class WithWeights(Dataset[tuple[Any, float]]):
    """A dataset whose items come with their weight, so that means over an epoch are exact.

    With ``tail="mask"``: ``sum(weight * loss) / sum(weight)``, both summed over all replicas, is the
    mean over the dataset; no sample counts twice.

    >>> WithWeights(["a", "b"])[PaddingIndex(1)]
    ('b', 0.0)
    """

    def __init__(self, dataset: Any) -> None:
        check_indexable(dataset)  # this wrapper would hide from a sampler what it is
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("shards", "expect", "adjust_cache", "is_replayed"):  # what samplers and jobs ask a dataset for
            return getattr(self.__dict__["dataset"], name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getitem__(self, index: int) -> tuple[Any, float]:
        return self.dataset[int(index)], weight_of(index)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, float]]:
        plain = [int(index) for index in indices]
        if callable(getattr(self.dataset, "__getitems__", None)):
            items = self.dataset.__getitems__(plain)
        else:
            items = [self.dataset[index] for index in plain]
        return list(zip(items, map(weight_of, indices), strict=True))


def draw(order: Order, seed: int, epoch: int, positions: Indices, tail: Tail) -> list[int]:
    """Return the indices at ``positions``, of which those from the epoch's length on are padding."""
    padding = positions >= order.length
    if not padding.any():
        return order.at(seed, epoch, positions).tolist()  # type: ignore[no-any-return]  # numpy's tolist
    indices = order.at(seed, epoch, positions % order.length).tolist()
    if tail == "mask":
        for number in padding.nonzero()[0].tolist():
            indices[number] = PaddingIndex(indices[number])
    return indices  # type: ignore[no-any-return]  # numpy's tolist
