"""The public names of phalanx.data, frozen: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import pytest

import phalanx.data

pytestmark = pytest.mark.fast


def test_public_names():
    assert phalanx.data.__all__ == [
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
    assert all(hasattr(phalanx.data, name) for name in phalanx.data.__all__)
