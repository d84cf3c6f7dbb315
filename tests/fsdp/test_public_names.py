"""The names that users import from ``phalanx.fsdp``; changing them is a decision, not an accident."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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


def parameters(function: Callable[..., Any]) -> list[tuple[str, object, str]]:
    """Names, kinds and defaults; of a default its text, since each side has its own policies."""
    return [(p.name, p.kind, str(p.default)) for p in inspect.signature(function).parameters.values()]


def test_methods_take_what_torchs_take():
    for name, theirs_ in vars(theirs.FSDPModule).items():
        if inspect.isfunction(theirs_) and not name.startswith("__"):
            assert parameters(getattr(phalanx.fsdp.FSDPModule, name)) == parameters(theirs_), name


NOT_CALLED_BY_USERS = {"FSDPModule", "UnshardHandle"}


@pytest.mark.parametrize("name", sorted(set(theirs.__all__) & set(phalanx.fsdp.__all__) - NOT_CALLED_BY_USERS))
def test_functions_and_policies_take_what_torchs_take(name):
    assert parameters(getattr(phalanx.fsdp, name)) == parameters(getattr(theirs, name))
