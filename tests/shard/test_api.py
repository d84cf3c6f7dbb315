"""Sharding parameters and modules on simulated ranks: plans, hooks, counts of collectives, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx import shard
from phalanx.comm import simulate
from phalanx.errors import RankFailed
from phalanx.shard import Sharder, ShardingPlan, ShardingPlanner, shard_module, shard_parameter
from shard.layouts import chunk, gathered, grid, values

pytestmark = pytest.mark.fast


def run(num_ranks, function, *args):
    try:
        return simulate(num_ranks).run(function, *args)
    except RankFailed as failed:
        raise failed.__cause__ from None


def test_a_parameter_becomes_the_source_ranks_data() -> None:
    def main(group):
        module = nn.Linear(4, 6)
        with torch.no_grad():
            module.weight.copy_(values(6, 4) * (group.rank + 1))
        shard_parameter(module, "weight", chunk(3), src_rank=2)
        assert isinstance(module.weight, nn.Parameter)
        assert isinstance(module.weight, shard.ShardedTensor)
        assert dict(module.named_parameters()).keys() == {"weight", "bias"}
        assert module.weight.requires_grad
        assert module.weight.local_tensor().is_leaf
        return gathered(module.weight)

    assert torch.equal(run(3, main)[0], values(6, 4) * 3)


def test_frozen_parameters_and_buffers_keep_their_kind() -> None:
    def main(group):
        module = nn.BatchNorm1d(4)
        module.weight.requires_grad_(False)
        module.table = torch.arange(4)
        shard_parameter(module, "weight", chunk(2))
        shard_parameter(module, "running_mean", chunk(2))
        shard_parameter(module, "table", chunk(2))
        assert not module.weight.requires_grad
        assert "running_mean" in dict(module.named_buffers())
        return module.table.local_tensor().tolist()

    assert run(2, main) == [[0, 1], [2, 3]]


def test_mistakes_name_the_parameter() -> None:
    def main(group, case):
        module = nn.Linear(4, 6)
        module.note = "text"
        module.turned = torch.zeros(3, 4).t()
        shard_parameter(module, case, chunk(2))

    for case, kind, message in (
        ("missing", AttributeError, "Linear has no attribute `missing`"),
        ("note", ValueError, "Expected Linear.note to be a Tensor, but found str"),
        ("turned", ValueError, "turned is not a contiguous Tensor"),
    ):
        with pytest.raises(kind, match=message):
            run(2, main, case)
    with pytest.raises(ValueError, match="not a contiguous"):
        run(2, lambda group: shard._shard_tensor(torch.zeros(3, 4).t(), chunk(2)))
    with pytest.raises(ValueError, match="src_rank=5"):
        run(2, lambda group: shard._shard_tensor(torch.zeros(3, 4), chunk(2), src_rank=5))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("source", r"src_rank=\d on rank: \d does not match with src_rank=\d on rank: \d"),
        ("spec", "sharding_spec=.* does not match"),
        ("size", "size=.* does not match with"),
    ],
)
def test_ranks_that_disagree_are_told_so(case, message) -> None:
    def main(group):
        odd = group.rank == 1
        tensor = torch.zeros(6 if case == "size" and odd else 4, 4)
        spec = chunk(2, 1 if case == "spec" and odd else 0)
        shard._shard_tensor(tensor, spec, src_rank=int(case == "source" and odd))

    with pytest.raises(ValueError, match=message):
        run(2, main)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 4, bias=False)
        self.fc2 = nn.Linear(4, 4)
        self.fc22 = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc1(x)


def test_output_is_resharded_and_collected_with_its_dim_squeezed() -> None:
    def main(group):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(2, 6)
        wanted = net(x)
        plan = ShardingPlan({"fc1.weight": chunk(2)}, output_plan={"": chunk(2)}, return_local_tensor=[""])
        shard_module(net, plan)
        out = net(x)
        assert type(out) is torch.Tensor
        assert out.shape == (4,), "a [2, 4] output on 2 ranks is [4] on each"
        assert torch.allclose(out, wanted[group.rank])
        out.sum().backward()
        return gathered(net.fc1.weight.grad)

    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 6)
    net(x).sum().backward()
    assert torch.allclose(run(2, main)[0], net.fc1.weight.grad)


def test_plain_outputs_pass_the_hooks_unchanged() -> None:
    net = Net()
    shard._reshard_output(net, chunk(1))
    shard._collect_local_shard(net)
    x = torch.ones(1, 6)
    assert torch.equal(net(x), net.fc1(x))


class Doubled(Sharder):
    def shard(self, module):
        return nn.Sequential(module, module)


def test_a_sharder_replaces_its_submodule() -> None:
    def main(group):
        net = Net()
        old = net.fc2
        shard_module(net, ShardingPlan({"fc2": Doubled(), "fc22.weight": chunk(2)}))
        assert isinstance(net.fc2, nn.Sequential)
        assert net.fc2[0] is old
        assert not hasattr(net, "mod_name")
        return isinstance(net.fc22.weight, shard.ShardedTensor)

    assert run(2, main) == [True, True], "fc22 does not lie in fc2"


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (ShardingPlan({"": Doubled()}), KeyError, "must not be empty"),
        (
            ShardingPlan({"fc2": Doubled(), "fc2.weight": chunk(1)}),
            RuntimeError,
            "lies in the submodule 'fc2'",
        ),
        (ShardingPlan({"fc1.weight": "rows"}), TypeError, "shard 'fc1.weight'"),
        (ShardingPlan({}, output_plan={"fc1": "rows"}), TypeError, "output_plan for 'fc1'"),
        (ShardingPlan({"fc9.weight": chunk(1)}), AttributeError, "fc9"),
        (ShardingPlan({"fc1.wait": chunk(1)}), AttributeError, "wait"),
        (ShardingPlan({}, return_local_tensor=["fc9"]), AttributeError, "fc9"),
    ],
)
def test_wrong_plans_are_refused_before_anything_changes(plan, kind, message) -> None:
    def main(group):
        net = Net()
        with pytest.raises(kind, match=message):
            shard_module(net, plan)
        assert not any(isinstance(p, shard.ShardedTensor) for p in net.parameters())
        assert isinstance(net.fc2, nn.Linear)

    run(1, main)


def test_sharing_stays_and_disagreeing_specs_for_shared_parameters_are_refused() -> None:
    def main(group):
        net = Net()
        net.fc22.weight = net.fc2.weight
        shard_module(net, ShardingPlan({"fc2.weight": chunk(2), "fc22.weight": chunk(2)}))
        assert net.fc22.weight is net.fc2.weight
        net = Net()
        net.fc22.weight = net.fc2.weight
        with pytest.raises(ValueError, match="one shared parameter"):
            shard_module(net, ShardingPlan({"fc2.weight": chunk(2), "fc22.weight": chunk(2, 1)}))

    run(2, main)


def test_tensors_of_all_widths_travel_together() -> None:
    """Odd numbers of bytes for every rank, in one buffer or several."""
    kinds = (torch.bool, torch.float32, torch.int16, torch.complex128, torch.bfloat16, torch.float64)

    def main(group):
        module = nn.Module()
        for i, kind in enumerate(kinds):
            module.register_buffer(f"b{i}", values(7, 3, dtype=kind))
        plan = ShardingPlan({f"b{i}": chunk(3, i % 2, [2, 0, 1]) for i in range(len(kinds))})
        shard_module(module, plan, src_rank=1)
        for i in range(len(kinds)):
            getattr(module, f"b{i}").reshard(chunk(3, (i + 1) % 2))
        return shard.gather_state_dict(dict(module.named_buffers()), dst=2)

    state = run(3, main)[2]
    for i, kind in enumerate(kinds):
        assert torch.equal(state[f"b{i}"], values(7, 3, dtype=kind))


def test_a_spec_of_ones_own_works_and_may_shard_by_itself() -> None:
    class Halves(shard.ShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            return chunk(2).build_metadata(tensor_sizes, tensor_properties)

    class Late(Halves):
        def shard(self, tensor, src_rank=0, process_group=None):
            return super().shard(tensor + 1, src_rank, process_group)

    def main(group):
        net = Net()
        with torch.no_grad():
            net.fc2.weight.fill_(1)
        shard_module(net, ShardingPlan({"fc1.weight": Halves(), "fc2.weight": Late()}))
        assert shard.EnumerableShardingSpec.shard is shard.ShardingSpec.shard
        return net.fc2.weight.local_tensor().detach().mean().item()

    assert run(2, main) == [2.0, 2.0]


def test_a_planner_makes_plans() -> None:
    class Rows(ShardingPlanner):
        def build_plan(self, module):
            return ShardingPlan({name: chunk(2) for name, _ in module.named_parameters()})

    def main(group):
        net = Net()
        shard_module(net, Rows().build_plan(net))
        return all(isinstance(p, shard.ShardedTensor) for p in net.parameters())

    assert run(2, main) == [True, True]
    with pytest.raises(TypeError):
        ShardingPlanner()
    with pytest.raises(TypeError):
        Sharder()


def test_state_dicts_carry_sharded_parameters_and_attributes() -> None:
    def main(group):
        torch.manual_seed(group.rank)
        first, second = Net(), Net()
        for net, spec in ((first, chunk(4)), (second, grid((4, 6)))):
            shard_parameter(net.fc1, "weight", spec)
            net.fc2.extra = shard.full(chunk(4), (4,), float(net is first))
            net._register_state_dict_hook(shard.state_dict_hook)
            net.register_load_state_dict_pre_hook(shard.pre_load_state_dict_hook)
        state = first.state_dict()
        assert isinstance(state["fc1.weight"], shard.ShardedTensor)
        assert isinstance(state["fc2.extra"], shard.ShardedTensor)
        state = {name: value for name, value in state.items() if "fc2." not in name or "extra" in name}
        second.load_state_dict(state, strict=False)
        assert second.fc2.extra is state["fc2.extra"]
        assert second.fc1.weight.sharding_spec() == grid((4, 6))
        return torch.equal(first.fc1.weight, second.fc1.weight)

    assert run(4, main) == [True] * 4


def test_modules_with_sharded_parameters_cast_and_copy() -> None:
    import copy

    def main(group):
        net = Net()
        shard_parameter(net.fc1, "weight", chunk(2))
        twin = copy.deepcopy(net)
        net.double()
        assert net.fc1.weight.dtype is torch.float64
        assert net.fc1.weight.local_tensor().dtype is torch.float64
        assert isinstance(net.fc1.weight, nn.Parameter)
        assert isinstance(twin.fc1.weight, nn.Parameter)
        assert twin.fc1.weight.dtype is torch.float32
        twin.fc1.weight.local_tensor().detach().zero_()
        return float(net.fc1.weight.local_tensor().detach().abs().sum()) > 0

    assert run(2, main) == [True, True]


def test_users_operations_come_first() -> None:
    class Own(shard.ChunkShardingSpec):
        pass

    def erfcx(types, args, kwargs, process_group):
        return "all", process_group.size

    def logit(types, args, kwargs, process_group):
        return "spec", process_group.size

    assert shard.custom_sharded_op_impl(torch.special.erfcx)(erfcx) is erfcx
    assert shard.custom_sharding_spec_op(Own, torch.special.logit)(logit) is logit

    def main(group):
        own = shard.ones(Own(0, ["rank:0/cpu"]), 4)
        assert torch.special.erfcx(own) == ("all", 1)
        assert torch.special.logit(own) == ("spec", 1)
        assert isinstance(torch.special.logit(shard.ones(chunk(1), 4) * 0.5), torch.Tensor)

    run(1, main)
    with pytest.raises(TypeError, match="callable"):
        shard.custom_sharded_op_impl(torch.special.erfcx)(3)
