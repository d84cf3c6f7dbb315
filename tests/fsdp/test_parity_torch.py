"""Losses, gradients and weights of ``fully_shard`` against torch's own, in the same processes, over gloo and shm."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh as their_mesh

from ddp.test_parity_torch import join_torch
from fsdp.models import MODELS, Run, assert_runs_close, assert_runs_near, build, train
from phalanx import fsdp as ours
from phalanx.comm import init_device_mesh as our_mesh
from phalanx.comm import use_group
from processes import run_processes

pytestmark = pytest.mark.timeout(600)

BF16 = torch.bfloat16
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "free": {"reshard_after_forward": True},
    "reduce float32": {"precision": {"param_dtype": BF16, "reduce_dtype": torch.float32}},
    "bfloat16": {"precision": {"param_dtype": BF16, "output_dtype": torch.float32}},
    "accumulate": {"accumulate": 3, "sync": "last"},
    "accumulate in sync": {"accumulate": 2, "sync": "always"},
    "clip": {"clip": 0.05},
    "offload": {"offload": True},
    "divide": {"divide": 3.0},
}


def sharded(api: Any, kind: str, mesh: Any, policy: dict[str, Any]) -> Any:
    model = build(kind)
    precision = policy.get("precision", {})
    options: dict[str, Any] = {"mesh": mesh}
    if "reshard_after_forward" in policy:
        options["reshard_after_forward"] = policy["reshard_after_forward"]
    if policy.get("offload"):
        options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    inner = {name: value for name, value in precision.items() if name != "output_dtype"}
    for block in model.blocks():
        api.fully_shard(block, mp_policy=api.MixedPrecisionPolicy(**inner), **options)
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(**precision), **options)
    if "divide" in policy:
        for module in model.modules():
            if isinstance(module, api.FSDPModule):
                module.set_gradient_divide_factor(policy["divide"])
                module.set_force_sum_reduction_for_comms(True)  # else torch asks gloo for what it cannot do
    return model


def run(api: Any, kind: str, mesh: Any, policy: dict[str, Any], worker: Any, steps: int) -> Any:
    def sync(model: Any, last: bool) -> None:
        if policy.get("sync") == "last":
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)

    model = sharded(api, kind, mesh, policy)
    options = {name: policy[name] for name in ("accumulate", "clip") if name in policy}
    return train(model, rank=worker.rank, size=worker.size, steps=steps, before_backward=sync, **options)


Cases = list[tuple[str, str, tuple[int, ...]]]


def _compare(worker: Any, cases: Cases, backends: list[str], steps: int) -> None:
    warnings.simplefilter("ignore")  # torch's own warn about themselves
    join_torch(worker)
    groups = {backend: worker.group(backend=backend, generation=i) for i, backend in enumerate(backends)}
    try:
        for kind, name, shape in cases:
            policy = POLICIES[name]
            names = ("replicate", "shard")[-len(shape) :]
            expected = run(theirs, kind, their_mesh("cpu", shape, mesh_dim_names=names), policy, worker, steps)
            # two ranks add the same two numbers; more of them, in bfloat16, come to other roundings in another order
            rounds = shape[-1] > 2 and name == "bfloat16"
            for backend, group in groups.items():
                with use_group(group):
                    found = run(ours, kind, our_mesh("cpu", shape, mesh_dim_names=names), policy, worker, steps)
                compare = assert_runs_near if rounds else assert_runs_close
                compare(found, expected, f"{kind}, {name}, {shape} on {backend}")
    finally:
        dist.destroy_process_group()


def matrix(*shapes: tuple[int, ...]) -> Cases:
    """Every model with every policy."""
    return [(kind, name, shape) for shape in shapes for kind in MODELS for name in POLICIES]


def spread(shape: tuple[int, ...], start: int) -> Cases:
    """Every policy once, and the models in turn, each with several."""
    kinds = list(MODELS)
    return [(kinds[(start + i) % len(kinds)], name, shape) for i, name in enumerate(POLICIES)]


def test_two_ranks_train_as_with_torch():
    run_processes(2, _compare, spread((2,), 0), ["gloo", "auto"], 10, timeout=560.0)


def test_four_ranks_train_as_with_torch():
    cases: Cases = [("mlp", "clip", (4,)), ("convnet", "bfloat16", (4,))]
    cases += [("transformer", "accumulate", (2, 2)), ("tied", "reduce float32", (2, 2))]
    run_processes(4, _compare, cases, ["gloo", "auto"], 10, timeout=560.0)


def _divide(worker: Any) -> tuple[float, float]:
    """The gradient of one weight, which is 1 undivided, with torch's and with ours: hybrid, each shard on one rank."""
    warnings.simplefilter("ignore")  # torch's own warn about themselves
    join_torch(worker)
    found = []
    try:
        with use_group(worker.group(backend="auto")):
            for api, make_mesh in ((theirs, their_mesh), (ours, our_mesh)):
                model = torch.nn.Linear(1, 1, bias=False)
                mesh = make_mesh("cpu", (worker.size, 1), mesh_dim_names=("replicate", "shard"))
                api.fully_shard(model, mesh=mesh)
                model.set_gradient_divide_factor(4.0)
                model.set_force_sum_reduction_for_comms(True)
                model(torch.full((1, 1), 1 / worker.size)).sum().backward()
                found.append(model.weight.grad.to_local().item())
    finally:
        dist.destroy_process_group()
    return found[0], found[1]


def test_a_shard_of_one_rank_divides_once_where_torch_divides_twice():
    """Torch divides where it would have reduced over one rank, and once more at the end."""
    for outcome in run_processes(2, _divide, timeout=240.0):
        assert outcome.value == (1 / 16, 1 / 4)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("wrong", [0.0, 0.5, -1.0, 1.05])
def test_a_wrong_gradient_in_bfloat16_is_noticed(kind, wrong):
    """In each single tensor, however small its numbers are."""
    right = train(build(kind), steps=1, around_forward=in_bfloat16)
    for name, gradient in right.gradients[0].items():
        other = Run(right.losses, [{**right.gradients[0], name: gradient * wrong}], right.weights)
        with pytest.raises(AssertionError, match=f"gradient of {name} in step 0 is apart"):
            assert_runs_near(other, right, kind)
    assert_runs_near(right, right, kind)


def in_bfloat16(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16):
        return model(x)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4])
def test_every_model_with_every_policy_trains_as_with_torch(size):
    shapes = [(2,)] if size == 2 else [(4,), (2, 2)]
    run_processes(size, _compare, matrix(*shapes), ["gloo", "auto"], 10, timeout=3500.0)
