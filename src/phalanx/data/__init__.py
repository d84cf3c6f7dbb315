"""Samples every element exactly once, at any world size, in constant memory.

``ElasticDistributedSampler`` splits a dataset over replicas; ``ElasticBatchSampler`` gives each slot of
an elastic job its batch in each step. Both follow an ``Order``, a pure function of seed, epoch and
position, and save their place as one position that every world size can resume from.

``ShardedDataset`` is a dataset whose samples lie in shards (``phalanx.data.sources``); ``shuffle="shards"`` reads a few
of them at a time.
"""

from __future__ import annotations

from phalanx.data._batches import ElasticBatchSampler
from phalanx.data._order import BlockShuffled, Order, Sequential, Shuffled
from phalanx.data._padding import PaddingIndex, WithWeights, weight_of
from phalanx.data._ranks import SamplerMismatch
from phalanx.data._sampler import ElasticDistributedSampler
from phalanx.data._wrapped_orders import ConcatOrder, IndexOrder, SamplerOrder, WeightedOrder
from phalanx.data.shards._mixed_order import MixedOrder
from phalanx.data.shards._packed_documents import Packed, document_lengths
from phalanx.data.shards._replayed import Replayed, ReplayWarning
from phalanx.data.shards._shard_order import ShardOrder
from phalanx.data.shards._shard_source import ShardReader, ShardSource
from phalanx.data.shards._shard_table import ShardTable
from phalanx.data.shards._sharded_dataset import Concatenated, ShardedDataset

__all__ = [
    "BlockShuffled",
    "ConcatOrder",
    "Concatenated",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "IndexOrder",
    "MixedOrder",
    "Order",
    "Packed",
    "PaddingIndex",
    "ReplayWarning",
    "Replayed",
    "SamplerMismatch",
    "SamplerOrder",
    "Sequential",
    "ShardOrder",
    "ShardReader",
    "ShardSource",
    "ShardTable",
    "ShardedDataset",
    "Shuffled",
    "WeightedOrder",
    "WithWeights",
    "document_lengths",
    "weight_of",
]
