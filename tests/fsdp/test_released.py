"""Whole parameters that users kept aside: an error, or NaN through a view, never the end of the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp.models import batch, build
from fsdp.ranks import on_ranks, shard
from phalanx.comm import init_device_mesh, use_group
from phalanx.fsdp import fully_shard
from phalanx.fsdp.unit._mapped_gather import MappedGather
from phalanx.tensor.parallel import ColwiseParallel, parallelize_module
from processes import run_processes

pytestmark = pytest.mark.timeout(120)

USES = {
    "add": lambda w: w + 1,
    "linear": lambda w: F.linear(torch.ones(1, w.shape[-1]), w),
    "clone": lambda w: w.clone(),
    "stack": lambda w: torch.stack([w, w]),
    "write": lambda w: w.detach().fill_(0),
}


def kept_aside(model: Any, module: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}

    def keep(called: Any, args: Any) -> None:
        kept.update(parameter=called.weight, view=called.weight[1:], alias=called.weight.detach())

    handle = module.register_forward_pre_hook(keep)  # behind that of fully_shard
    model(batch(0)).pow(2).mean().backward()
    handle.remove()
    return kept


def assert_refused(parameter: Any, unit: str, name: str) -> None:
    for use in USES.values():
        with pytest.raises(RuntimeError, match=rf"rank \d: \w+ of parameter '{name}' of unit '{unit}', which was kept"):
            use(parameter)


def test_a_parameter_that_was_kept_aside_is_refused_by_name():
    def body(mesh):
        model = shard(build("mlp"), mesh)
        first, aside = model.first, kept_aside(model, model.first)
        kept = aside["parameter"]
        assert aside["view"].isnan().all()
        assert aside["alias"].isnan().all()
        assert_refused(kept, "first", "weight")
        assert (kept.shape, kept.grad, kept.requires_grad, kept.dim()) == ((11, 6), None, True, 2)
        first.unshard()
        assert first.weight is kept
        assert type(kept) is nn.Parameter
        torch.testing.assert_close(kept + 1, build("mlp").first.weight + 1)
        first.reshard()
        assert_refused(kept, "first", "weight")

    on_ranks(body, 2)


def test_a_distributed_parameter_that_was_kept_aside_is_refused_too():
    def body(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        kept = kept_aside(model, model[0])["parameter"]
        for use in (lambda: kept + 1, lambda: kept.to_local().sum(), lambda: torch.stack([kept])):
            with pytest.raises(RuntimeError, match=r"parameter '0\.weight' of unit 'root', which was kept"):
                use()
        model(batch(0)).sum().backward()

    on_ranks(body, 2, 2, names=("dp", "tp"))


def _on_one_host(worker: Any) -> None:
    group = worker.group(backend="auto", timeout=60)
    with use_group(group):
        model = shard(build("mlp"), init_device_mesh("cpu", (worker.size,)))
        kept = kept_aside(model, model.first)
        assert isinstance(model.first._get_fsdp_state().unit.sections[0].gather, MappedGather)
        assert_refused(kept["parameter"], "first", "weight")
        for name in ("view", "alias"):
            assert kept[name].isnan().all(), name
        kept["alias"].fill_(3.0)  # seen by nobody
        torch.testing.assert_close(model(batch(0)), build("mlp")(batch(0)))


def test_reading_it_on_one_host_does_not_end_the_process():
    run_processes(2, _on_one_host, timeout=100.0)


def test_an_optimizer_made_before_fully_shard_is_told_so():
    def body(mesh):
        model = build("mlp")
        early, beside = torch.optim.AdamW(model.parameters()), nn.Linear(2, 2)
        shard(model, mesh)
        other = torch.optim.SGD(beside.parameters(), lr=0.1)
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch(0)).pow(2).mean().backward()
            beside(torch.ones(1, 2)).sum().backward()
            other.step()
            late.step()
            with pytest.raises(RuntimeError, match=r"AdamW.step\(\): 7 of its 7 parameters were replaced"):
                early.step()
        early.param_groups[0]["params"] = list(model.parameters())
        early.step()

    on_ranks(body, 2)


def test_an_original_that_still_trains_elsewhere_may_be_stepped():
    def body(mesh):
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        other.weight = one.weight
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        fully_shard(one, mesh=mesh)
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    on_ranks(body, 2)
