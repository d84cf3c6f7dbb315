"""The same calls on ours and on torch's sharding API, on gloo processes: same shards, results and kinds of errors."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from processes import run_processes


def both(worker, file):
    """torch's modules and ours, on one default process group."""
    import torch.distributed as dist
    from torch.distributed import _shard as theirs
    from torch.distributed._shard import sharded_optim, sharded_tensor, sharder, sharding_plan, sharding_spec

    from phalanx import shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=worker.rank, world_size=worker.size)

    class Torch:
        shard_module, shard_parameter = (
            staticmethod(theirs.shard_module),
            staticmethod(theirs.shard_parameter),
        )
        _shard_tensor, load_with_process_group = (
            staticmethod(theirs._shard_tensor),
            staticmethod(theirs.load_with_process_group),
        )
        ChunkShardingSpec, EnumerableShardingSpec = (
            sharding_spec.ChunkShardingSpec,
            sharding_spec.EnumerableShardingSpec,
        )
        ShardMetadata = sharding_spec.ShardMetadata
        ShardingPlan, Sharder = sharding_plan.ShardingPlan, sharder.Sharder
        _reshard_output = staticmethod(theirs.api._reshard_output)
        _collect_local_shard = staticmethod(theirs.api._collect_local_shard)
        custom_sharded_op_impl = staticmethod(sharded_tensor.custom_sharded_op_impl)
        custom_sharding_spec_op = staticmethod(sharding_spec.api.custom_sharding_spec_op)
        state_dict_hook = staticmethod(sharded_tensor.state_dict_hook)
        pre_load_state_dict_hook = staticmethod(sharded_tensor.pre_load_state_dict_hook)
        Shard, ShardedTensor = sharded_tensor.Shard, sharded_tensor.ShardedTensor
        init_from_local_shards = staticmethod(sharded_tensor.init_from_local_shards)
        zeros, ones, full = (
            staticmethod(sharded_tensor.zeros),
            staticmethod(sharded_tensor.ones),
            staticmethod(sharded_tensor.full),
        )
        rand, randn, empty = (
            staticmethod(sharded_tensor.rand),
            staticmethod(sharded_tensor.randn),
            staticmethod(sharded_tensor.empty),
        )
        ShardedOptimizer = sharded_optim.ShardedOptimizer
        named_params_with_sharded_tensor = staticmethod(sharded_optim.named_params_with_sharded_tensor)

    return Torch, shard


def spec_of(api, size, dim=0, order=None):
    return api.ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in order or range(size)])


def seen(tensor):
    """What a sharded tensor of either kind shows, as plain values."""
    return {
        "size": tuple(tensor.size()),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "shards": sorted((s.shard_offsets, s.shard_sizes, str(s.placement)) for s in tensor.metadata().shards_metadata),
        "local": [(s.metadata.shard_offsets, s.tensor.detach().tolist()) for s in tensor.local_shards()],
        "spec": type(tensor.sharding_spec()).__name__,
    }


def tensors(api, rank, size):
    """Everything that makes or moves a sharded tensor."""
    whole = torch.arange(4.0 * size * size).reshape(2 * size, 2 * size)
    turned = list(reversed(range(size)))
    made = {}
    for dim in (0, 1, -1):
        made[f"shard {dim}"] = api._shard_tensor(whole, spec_of(api, size, dim))
    made["source"] = api._shard_tensor(whole + rank, spec_of(api, size), src_rank=1)
    made["grad"] = api._shard_tensor(whole.clone().requires_grad_(), spec_of(api, size, 0, turned))
    made["uneven"] = api._shard_tensor(whole[: 2 * size - 1].contiguous(), spec_of(api, size))
    for name, spec in (("other dim", spec_of(api, size, 1)), ("other order", spec_of(api, size, 0, turned))):
        made[f"reshard {name}"] = api._shard_tensor(whole, spec_of(api, size)).reshard(spec)
    made["zeros"] = api.zeros(spec_of(api, size), 2 * size, 3)
    made["ones"] = api.ones(spec_of(api, size, 1), 3, 2 * size, dtype=torch.float64)
    made["full"] = api.full(spec_of(api, size), [2 * size], 3.5)
    torch.manual_seed(rank)
    made["rand"] = api.rand(spec_of(api, size), size, 4)
    made["randn"] = api.randn(spec_of(api, size), size, 4)
    made["kaiming"] = api.zeros(spec_of(api, size), size, 4)
    nn.init.kaiming_uniform_(made["kaiming"], a=1.0)
    made["normal"] = api.zeros(spec_of(api, size), size, 2)
    nn.init.normal_(made["normal"], 1.0, 2.0)
    made["uniform"] = api.zeros(spec_of(api, size, 1), 3, size)
    nn.init.uniform_(made["uniform"], 2.0, 3.0)
    made["constant"] = api.zeros(spec_of(api, size), size, 2)
    nn.init.constant_(made["constant"], 7.0)
    several = [f"rank:{r}/cpu" for r in range(size)] * 2
    made["several"] = api.ones(api.ChunkShardingSpec(0, several), 4 * size, 2)
    shards = [api.ShardMetadata([2 * r, 0], [2, 3], f"rank:{r}/cpu") for r in range(size)]
    made["listed"] = api.zeros(api.EnumerableShardingSpec(shards), 2 * size, 3)
    local = api.Shard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    made["local"] = api.init_from_local_shards([local], [2 * size, 3])
    made["local tensor"] = api.ShardedTensor._init_from_local_tensor(
        torch.full((2, 3), float(rank)), spec_of(api, size), [2 * size, 3]
    )
    made["metadata"] = api.ShardedTensor._init_from_local_shards_and_global_metadata(
        made["local"].local_shards(), made["local"].metadata()
    )
    made["clone"], made["detach"] = made["source"].clone(), made["grad"].detach()
    made["deep"] = copy.deepcopy(made["source"])
    made["cast"] = made["source"].to(torch.float16)
    made["copied"] = made["zeros"].clone().copy_(made["listed"])
    file = io.BytesIO()
    torch.save(made["grad"], file)
    file.seek(0)
    made["loaded"] = torch.load(file, weights_only=False)
    result = {name: seen(tensor) for name, tensor in made.items()}
    for dst in (0, 1):
        out = torch.empty(2 * size, 2 * size) if rank == dst else None
        made["shard 1"].gather(dst, out)
        result[f"gathered {dst}"] = None if out is None else out.tolist()
    return result


class Model(nn.Module):
    def __init__(self, size) -> None:
        super().__init__()
        self.rows = nn.Embedding(3 * size, 4)
        self.columns = nn.Embedding(5, 2 * size)
        self.bag = nn.EmbeddingBag(2 * size, 3, mode="sum")
        self.bag_columns = nn.EmbeddingBag(4, 2 * size, mode="mean")


def training(api, rank, size):
    """A module sharded by a plan, looked up with each rank's own batch, trained two steps."""
    torch.manual_seed(0)
    model = Model(size)
    plan = api.ShardingPlan(
        plan={
            "rows.weight": spec_of(api, size),
            "columns.weight": spec_of(api, size, 1),
            "bag.weight": spec_of(api, size),
            "bag_columns.weight": spec_of(api, size, 1),
        }
    )
    api.shard_module(model, plan)
    ids = torch.tensor([[rank, 1], [2, rank], [3, 3]])
    optimizer = api.ShardedOptimizer(dict(api.named_params_with_sharded_tensor(model)), torch.optim.SGD, lr=0.1)
    results = {}
    for name in ("rows", "columns", "bag", "bag_columns"):
        results[name] = getattr(model, name)(ids).detach()
    results["names"] = [name for name, _ in api.named_params_with_sharded_tensor(model)]
    for shard in model.rows.weight.local_shards():
        shard.tensor.grad = torch.ones_like(shard.tensor)
    optimizer.step()
    results["stepped"] = model.rows.weight.local_tensor().detach().clone()
    results["keys"] = sorted(model.state_dict())
    return results


class Give(nn.Module):
    """Returns its weight, whatever that has become."""

    def __init__(self, rows, columns) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(rows * columns)).reshape(rows, columns), False)

    def forward(self):
        return self.weight


def modules(api, rank, size):
    """Outputs that are resharded and collected, hooks on state dicts, operations of users."""
    results = {}
    for name, shape, spec, output in (
        ("collected", (2 * size, 3), spec_of(api, size), None),
        ("squeezed", (size, 3), spec_of(api, size), None),
        ("resharded", (2 * size, 2 * size), spec_of(api, size), spec_of(api, size, 1)),
        ("resharded, squeezed", (2 * size, size), spec_of(api, size), spec_of(api, size, 1)),
    ):
        module = nn.Sequential(Give(*shape))
        plan = api.ShardingPlan(
            {"0.weight": spec}, output_plan={"0": output} if output else None, return_local_tensor=["0"]
        )
        api.shard_module(module, plan)
        results[name] = module[0]().detach().clone()
    results["only resharded"] = seen(
        api._reshard_output(nn.Identity(), spec_of(api, size, 1))(
            api._shard_tensor(torch.ones(size, size), spec_of(api, size))
        )
    )
    plain = torch.ones(2)
    results["plain"] = api._collect_local_shard(nn.Identity())(plain) is plain

    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    for number, module in enumerate((first, second)):
        module[0].extra = api.full(spec_of(api, size), (size,), float(number))
        module._register_state_dict_hook(api.state_dict_hook)
        module._register_load_state_dict_pre_hook(api.pre_load_state_dict_hook, True)
    state = first.state_dict()
    results["state"] = sorted(state)
    second.load_state_dict(state, strict=False)
    results["put back"] = seen(second[0].extra)

    class Own(api.ChunkShardingSpec):
        pass

    @api.custom_sharded_op_impl(torch.special.erfcx)
    def erfcx(types, args, kwargs, process_group):
        return "for all"

    @api.custom_sharding_spec_op(Own, torch.special.ndtri)
    def ndtri(types, args, kwargs, process_group):
        return "for a spec"

    own = api.ones(Own(0, [f"rank:{r}/cpu" for r in range(size)]), size)
    results["custom"] = (torch.special.erfcx(own), torch.special.ndtri(own))
    return results


def mistakes(api, rank, size):
    """The kind of error that each mistake gives on this rank."""
    odd = rank == 1
    linear = nn.Linear(4, 2 * size)
    linear.note, linear.turned = "text", torch.zeros(3, 4).t()
    spec = spec_of(api, size)
    local = api.Shard.from_tensor_and_offsets

    def nested():
        with api.load_with_process_group(None or object()), api.load_with_process_group(object()):
            pass

    class Same(api.Sharder):
        def shard(self, module):
            return module

    def from_metadata(dtype=torch.float32, count=1):
        """A shard that lies elsewhere than the metadata says is not among them: torch takes it, ours does not."""
        good = api.zeros(spec, 2 * size)
        parts = [local(torch.zeros(2, dtype=dtype), [2 * rank], rank) for _ in range(count)]
        return api.ShardedTensor._init_from_local_shards_and_global_metadata(parts, good.metadata())

    nested_module = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    both_ways = api.ShardingPlan({"0": Same(), "0.0.weight": spec})
    cases = {
        "sharder for the root": lambda: api.shard_module(nested_module, api.ShardingPlan({"": Same()})),
        "plan against sharder": lambda: api.shard_module(nested_module, both_ways),
        "other dtype": lambda: from_metadata(dtype=torch.float64),
        "too many shards": lambda: from_metadata(count=2),
        "turned local tensor": lambda: api.ShardedTensor._init_from_local_tensor(
            torch.zeros(3, 2).t(), spec, [2 * size, 3]
        ),
        "shard of another rank": lambda: api.init_from_local_shards(
            [local(torch.zeros(2), [2 * rank], (rank + 1) % size)], [2 * size]
        ),
        "shards overlap": lambda: api.EnumerableShardingSpec(
            [api.ShardMetadata([0], [2], "rank:0/cpu"), api.ShardMetadata([1], [2], "rank:1/cpu")]
        ),
        "shards leave a gap": lambda: api.zeros(
            api.EnumerableShardingSpec([api.ShardMetadata([0], [2], "rank:0/cpu")]), 4
        ),
        "shard out of bounds": lambda: api.zeros(
            api.EnumerableShardingSpec([api.ShardMetadata([0], [6], "rank:0/cpu")]), 4
        ),
        "negative offset": lambda: api.ShardMetadata([-1], [2], "rank:0/cpu"),
        "lengths differ": lambda: api.ShardMetadata([0, 0], [2], "rank:0/cpu"),
        "to the gpu": lambda: api.zeros(spec, 4).cuda(),
        "pinned": lambda: api.zeros(spec, 4, pin_memory=True),
        "no attribute": lambda: api.shard_parameter(linear, "wait", spec),
        "no tensor": lambda: api.shard_parameter(linear, "note", spec),
        "not contiguous": lambda: api.shard_parameter(linear, "turned", spec),
        "tensor not contiguous": lambda: api._shard_tensor(torch.zeros(3, 4).t(), spec),
        "sources differ": lambda: api._shard_tensor(torch.zeros(4, 4), spec, src_rank=int(odd)),
        "specs differ": lambda: api._shard_tensor(torch.zeros(8, 8), spec_of(api, size, int(odd))),
        "dim": lambda: api._shard_tensor(torch.zeros(8, 8), spec_of(api, size, 5)),
        "plan type": lambda: api.shard_module(linear, api.ShardingPlan({"weight": "rows"})),
        "output type": lambda: api.shard_module(linear, api.ShardingPlan({}, output_plan={"": "rows"})),
        "no module": lambda: api.shard_module(linear, api.ShardingPlan({"sub.weight": spec})),
        "nested": nested,
        "stranger": lambda: api.zeros(api.ChunkShardingSpec(0, [f"rank:{size + 5}/cpu"]), 4),
        "size": lambda: api.zeros(spec, "four"),
        "layout": lambda: api.zeros(spec, 4, layout=torch.sparse_coo),
        "no spec": lambda: api.zeros("rows", 4),
        "overlap": lambda: api.init_from_local_shards([local(torch.zeros(2), [rank], rank)], [size + 1]),
        "gap": lambda: api.init_from_local_shards([local(torch.zeros(2), [2 * rank], rank)], [2 * size + 1]),
        "dtypes differ": lambda: api.init_from_local_shards(
            [local(torch.zeros(2, dtype=torch.float64 if odd else torch.float32), [2 * rank], rank)],
            [2 * size],
        ),
        "no shards": lambda: api.init_from_local_shards([], [4]),
        "gather size": lambda: (
            api.zeros(spec, 4 * size).gather(0, torch.zeros(3) if rank == 0 else None)
            if rank == 0
            else (_ for _ in ()).throw(ValueError())
        ),
        "named dim": lambda: api.ChunkShardingSpec("N", ["rank:0/cpu"]),
        "odd dim": lambda: api.ChunkShardingSpec(0.5, ["rank:0/cpu"]),
    }
    kinds = {}
    for name, case in cases.items():
        try:
            case()
            kinds[name] = "nothing"
        except Exception as error:
            kinds[name] = type(error).__name__
    return kinds


def compare(worker, file):
    theirs, ours = both(worker, file)
    for part in (tensors, training, modules, mistakes):
        wanted, found = (part(api, worker.rank, worker.size) for api in (theirs, ours))
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")
            else:
                assert found[name] == value, f"{part.__name__}: {name}: ours {found[name]}, torch's {value}"
    return len(wanted)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 4])
def test_ours_does_what_torchs_does(size, tmp_path) -> None:
    assert [outcome.value for outcome in run_processes(size, compare, str(tmp_path / "store"), timeout=200)] == [
        35
    ] * size
