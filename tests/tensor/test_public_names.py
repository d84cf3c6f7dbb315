"""The names users import are frozen here: removing or renaming one is a decision, not an accident."""

from __future__ import annotations

import importlib

import pytest

import phalanx.tensor
import phalanx.tensor.debug
import phalanx.tensor.experimental
import phalanx.tensor.parallel

pytestmark = pytest.mark.fast


def test_public_names() -> None:
    assert sorted(phalanx.tensor.__all__) == [
        "DTensor", "DeviceMesh", "ImplicitCommunicationError", "MaskPartial", "NoShardingRule", "Partial",
        "Placement", "Replicate", "Shard", "StridedShard", "arange", "communication_mode", "distribute_module",
        "distribute_tensor", "empty", "fallback_counts", "fallback_policy", "full", "get_rng_state",
        "implicit_replication", "init_device_mesh", "manual_seed", "ones", "rand", "randn", "randperm",
        "set_rng_state", "zeros",
    ]  # fmt: skip
    assert sorted(phalanx.tensor.debug.__all__) == [
        "Allowance", "CommContract", "CommDebugMode", "ContractBreach", "ContractReport", "ContractWarning",
        "check_contract", "comm_contract", "contracts", "layout_summary", "sharding_png", "sharding_svg",
        "visualize_sharding",
    ]  # fmt: skip
    assert sorted(phalanx.tensor.experimental.__all__) == [
        "implicit_replication",
        "local_map",
        "register_sharding",
    ]
    assert sorted(phalanx.tensor.parallel.__all__) == [
        "ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput",
        "RowwiseParallel", "SequenceParallel", "loss_parallel", "parallelize_module",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "package",
    [phalanx.tensor, phalanx.tensor.debug, phalanx.tensor.experimental, phalanx.tensor.parallel],
    ids=str,
)
def test_every_public_name_exists(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]  # a module
        assert hasattr(package, name)


def test_the_old_name_of_the_error_is_known_for_one_release() -> None:
    with pytest.warns(DeprecationWarning, match="ImplicitCommunicationError"):
        assert phalanx.tensor.SurpriseCommunication is phalanx.tensor.ImplicitCommunicationError
    with pytest.raises(AttributeError, match="no attribute 'Surprise'"):
        phalanx.tensor.Surprise  # noqa: B018  # asking is the test


@pytest.mark.parametrize(
    "name",
    ["placement_types", "device_mesh", "parallel.style", "parallel.api", "parallel.loss", "debug", "experimental"],
)
def test_torchs_module_names(name: str) -> None:
    """What torch's users import from a module is in ours of that name, and is what the package gives."""
    theirs = importlib.import_module(f"torch.distributed.tensor.{name}")
    ours = importlib.import_module(f"phalanx.tensor.{name}")
    package = phalanx.tensor.parallel if name.startswith("parallel") else phalanx.tensor
    for each in theirs.__all__:
        if each != "context_parallel":  # docs/parity.md says where it is
            assert getattr(ours, each) is getattr(package, each, getattr(ours, each)), each
