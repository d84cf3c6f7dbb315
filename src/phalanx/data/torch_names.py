"""Samplers under torch's names, with torch's order of arguments."""

from __future__ import annotations

from typing import Any

from phalanx.data._sampler import ElasticDistributedSampler

__all__ = ["DistributedSampler"]


class DistributedSampler(ElasticDistributedSampler):
    """``ElasticDistributedSampler`` with the positional arguments of ``torch.utils.data.DistributedSampler``.

    >>> list(DistributedSampler(range(4), 2, 1, False))
    [1, 3]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
