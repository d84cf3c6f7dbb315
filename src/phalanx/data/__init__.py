"""Samples every element exactly once, at any world size, in constant memory.

``ElasticDistributedSampler`` splits a dataset over replicas; ``ElasticBatchSampler`` gives each slot of
an elastic job its batch in each step. Both follow an ``Order``, a pure function of seed, epoch and
position, and save their place as one position that every world size can resume from.
"""

from __future__ import annotations

from phalanx.data._batches import ElasticBatchSampler
from phalanx.data._order import BlockShuffled, Order, Sequential, Shuffled
from phalanx.data._padding import PaddingIndex, WithWeights, weight_of
from phalanx.data._ranks import SamplerMismatch
from phalanx.data._sampler import ElasticDistributedSampler
from phalanx.data._wrapped_orders import ConcatOrder, IndexOrder, SamplerOrder, WeightedOrder

__all__ = [
    "BlockShuffled",
    "ConcatOrder",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "IndexOrder",
    "Order",
    "PaddingIndex",
    "SamplerMismatch",
    "SamplerOrder",
    "Sequential",
    "Shuffled",
    "WeightedOrder",
    "WithWeights",
    "weight_of",
]
