"""The public names of context parallel."""

from __future__ import annotations

import pytest

import phalanx.fsdp.context

pytestmark = pytest.mark.fast


def test_public_names() -> None:
    assert sorted(phalanx.fsdp.context.__all__) == ["context_parallel", "context_parallel_unshard", "set_rotate_method"]
    for name in phalanx.fsdp.context.__all__:
        assert hasattr(phalanx.fsdp.context, name)
