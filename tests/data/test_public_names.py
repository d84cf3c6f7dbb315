"""The public names of phalanx.data, frozen: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import pytest

import phalanx.data
import phalanx.data.sources

pytestmark = pytest.mark.fast


def test_public_names():
    assert phalanx.data.__all__ == [
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
    assert all(hasattr(phalanx.data, name) for name in phalanx.data.__all__)
    assert phalanx.data.sources.__all__ == [
        "LitDataSource",
        "MDSSource",
        "NodeCache",
        "ParquetSource",
        "TarSource",
        "from_huggingface",
    ]
