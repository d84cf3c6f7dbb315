"""The names that users import from ``phalanx.fsdp``; changing them is a decision, not an accident."""

from __future__ import annotations

import pytest
from torch.distributed import fsdp as theirs

import phalanx.fsdp

pytestmark = pytest.mark.fast


def test_public_names_are_frozen():
    assert phalanx.fsdp.__all__ == [
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "ModelDigest",
        "OffloadPolicy",
        "UnshardHandle",
        "context",
        "fully_shard",
        "layout_summary",
        "model_digest",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ]
    assert all(hasattr(phalanx.fsdp, name) for name in phalanx.fsdp.__all__)


def test_every_method_of_torchs_module_is_there():
    wanted = {name for name in vars(theirs.FSDPModule) if not name.startswith("_")}
    assert wanted <= set(vars(phalanx.fsdp.FSDPModule))
