"""The public names of the packages that everything else stands on; change them on purpose only."""

from __future__ import annotations

import pytest

import phalanx
import phalanx.comm

pytestmark = pytest.mark.fast


def test_names_of_comm() -> None:
    assert sorted(phalanx.comm.__all__) == [
        "CommEvent",
        "DeviceMesh",
        "Group",
        "ReduceOp",
        "Simulation",
        "Transport",
        "Work",
        "current_group",
        "faults",
        "init",
        "init_device_mesh",
        "observe",
        "simulate",
        "stores",
        "use_group",
    ]
    assert all(hasattr(phalanx.comm, name) for name in phalanx.comm.__all__)


def test_top_level_names_load_and_a_wrong_one_is_explained() -> None:
    assert all(getattr(phalanx, name) is not None for name in phalanx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Grup'; it offers"):
        phalanx.Grup  # noqa: B018  # the access is what is tested
