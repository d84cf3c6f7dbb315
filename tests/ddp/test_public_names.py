"""The names that users import from ``phalanx.ddp``; changing them is a decision, not an accident."""

from __future__ import annotations

import pytest

import phalanx.ddp
import phalanx.ddp.hooks

pytestmark = pytest.mark.fast


def test_public_names_are_frozen():
    assert phalanx.ddp.__all__ == [
        "DistributedDataParallel",
        "GradBucket",
        "Join",
        "JoinHook",
        "Joinable",
        "Reducer",
        "ReducerOptions",
        "ReplicaDrift",
        "ReplicaMismatch",
        "_BufferCommHookLocation",
        "_DDPJoinHook",
        "_MixedPrecision",
        "_dump_DDP_relevant_env_vars",
        "_find_tensors",
        "hooks",
    ]
    assert phalanx.ddp.hooks.__all__ == [
        "DDPCommHookType",
        "debugging",
        "default",
        "mixed_precision",
        "optimizer_overlap",
        "post_local_sgd",
        "powersgd",
        "quantization",
        "register_ddp_comm_hook",
    ]
    for module in (phalanx.ddp, phalanx.ddp.hooks):
        assert all(hasattr(module, name) for name in module.__all__)
