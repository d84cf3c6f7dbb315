"""Programs as users of torch's DTensor, tensor parallel and sharding API write them, with torch's imports only.

A test runs each twice on the same processes, the second time with our imports (``imports.py``), and compares what they
return: tensors, numbers and lists of them. Gradients are compared as whole tensors: where torch leaves one partial,
ours is summed.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._shard import shard_module, shard_parameter, sharded_tensor
from torch.distributed._shard.sharded_optim import ShardedOptimizer, named_params_with_sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_plan import ShardingPlan, ShardingPlanner
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    full,
    ones,
    zeros,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication, local_map, register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.api import parallelize_module as the_same_parallelize_module
from torch.distributed.tensor.parallel.style import ColwiseParallel as TheSameColwiseParallel
from torch.distributed.tensor.placement_types import Placement

Results = list[object]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(module: nn.Module) -> Results:
    return [whole(parameter) for _, parameter in sorted(module.named_parameters())]


def where(tensor: DTensor) -> list[str]:
    """Layout in words that do not depend on how placements are printed."""
    return [
        f"shard {p.dim}" if isinstance(p, Shard) else "replica" if p.is_replicate() else "partial"
        for p in tensor.placements
    ]


def train(module: nn.Module, batch: torch.Tensor, steps: int = 3, **options: object) -> Results:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return [*losses, *wholes(module)]


# ---- DTensor


def layouts_and_redistribution() -> Results:
    mesh, table = line(), torch.arange(35.0).reshape(7, 5)
    rows = distribute_tensor(table, mesh, [Shard(0)])
    found: Results = [rows.to_local(), list(rows.shape), where(rows), rows.device_mesh.size(), rows.dtype]
    for placements in ([Replicate()], [Shard(1)], [Shard(-1)]):
        moved = rows.redistribute(mesh, placements)
        found += [moved.to_local(), where(moved)]
    sums = DTensor.from_local(torch.full((2, 2), float(dist.get_rank())), mesh, [Partial()])
    found += [sums.full_tensor(), sums.redistribute(placements=[Shard(0)]).to_local()]
    found += [whole(distribute_tensor(table, mesh, [Partial()])), where(distribute_tensor(table, mesh, [Partial()]))]
    return found


def two_axes() -> Results:
    mesh = grid()
    x = distribute_tensor(torch.arange(48.0).reshape(8, 6), mesh, [Shard(0), Shard(1)])
    y = distribute_tensor(torch.ones(6, 4), mesh["tp"], [Shard(0)]).to_local().sum()
    part = mesh["tp"]
    local = DTensor.from_local(torch.ones(2, 3), part, [Shard(0)])
    return [x.to_local(), whole(x.redistribute(placements=[Replicate(), Shard(0)])), y, whole(local), where(x)]


def operations_and_gradients() -> Results:
    mesh = line()
    a = distribute_tensor(torch.arange(24.0).reshape(4, 6) / 10, mesh, [Shard(0)]).requires_grad_()
    b = nn.Parameter(distribute_tensor(torch.arange(18.0).reshape(6, 3) / 10, mesh, [Replicate()]))
    product = torch.softmax(a @ b, -1)
    loss = (product * torch.arange(3.0).sum()).pow(2).sum()
    loss.backward()
    return [whole(product), where(product), whole(loss), whole(a.grad), whole(b.grad), where(a.grad)]


def factories() -> Results:
    mesh = line()
    made = [
        zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]),
        ones((5, 3), device_mesh=mesh, placements=[Shard(1)], dtype=torch.float64),
        full((4,), 7, device_mesh=mesh, placements=[Replicate()], dtype=torch.int64),
    ]
    like = [torch.zeros_like(made[0]), made[1].new_ones(5, 3), torch.full_like(made[2], 3)]
    return [item for tensor in (*made, *like) for item in (whole(tensor), tensor.to_local(), tensor.dtype)]


def parameters_and_local_tensors() -> Results:
    parameter = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(4, 2), line(), [Shard(0)]))
    local = parameter.to_local()
    (local * 3).sum().backward()
    with torch.no_grad():
        quiet = parameter.to_local()
        parameter.zero_()
    facts = [[isinstance(t, nn.Parameter), t.requires_grad, t.is_leaf] for t in (local, quiet)]
    return [facts, whole(parameter.grad), quiet]


def writing_into_what_came_from_local() -> Results:
    leaf = torch.ones(2, 3, requires_grad=True)
    tensor = DTensor.from_local(leaf, line(), [Shard(0)])
    tensor.add_(1)
    tensor.mul_(2)
    tensor.sum().backward()
    other = torch.ones(2, 3, requires_grad=True)
    filled = DTensor.from_local(other, line(), [Shard(0)])
    filled.fill_(5)
    filled.sum().backward()
    squeezed = distribute_tensor(torch.arange(8.0).reshape(1, 8), line(), [Shard(1)])
    torch.ops.aten.squeeze_.dim(squeezed, 0)
    return [leaf.detach(), leaf.grad, other.detach(), other.grad, list(squeezed.shape), where(squeezed)]


def a_module_by_hand() -> Results:
    mesh = line()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            for key, value in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))

    distribute_module(
        model,
        mesh,
        cut,
        input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(0)]),
        output_fn=lambda module, outputs, mesh: outputs.redistribute(placements=[Replicate()]),
    )
    return train(model, torch.ones(2, 6) * (dist.get_rank() + 1))


def the_old_forms_of_input_and_output_functions() -> Results:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    distribute_module(
        model,
        line(),
        input_fn=lambda inputs, mesh: tuple(distribute_tensor(one, mesh, [Shard(0)]) for one in inputs),
        output_fn=lambda outputs, mesh: outputs.full_tensor(),
    )
    return [model(torch.ones(4, 6)).detach()]


def a_module_that_begins_on_the_meta_device() -> Results:
    mesh = line()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.1 * (index + 1))
    return train(model, torch.ones(3, 4))


def clipping_and_optimizers() -> Results:
    found: Results = []
    for foreach in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        parallelize_module(model, line(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model(torch.ones(2, 6)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach).step()
        found += [whole(norm), *wholes(model)]
    return found


def saved_and_loaded() -> Results:
    torch.manual_seed(0)
    model = parallelize_module(nn.Linear(6, 8), line(), ColwiseParallel())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    return [*(whole(value) for value in state.values()), *wholes(model), sorted(state)]


def checkpointed() -> Results:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    mesh, table = line(), torch.arange(42.0).reshape(7, 6)
    try:
        dcp.save({"rows": distribute_tensor(table, mesh, [Shard(0)])}, checkpoint_id=f"{folder[0]}/one")
        state = {"rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)])}
        dcp.load(state, checkpoint_id=f"{folder[0]}/one")
        return [state["rows"].to_local().clone(), whole(state["rows"])]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


# ---- tensor parallel


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = [
            layer(x).view(batch, length, -1, 8 // self.num_heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(8), Attention()
        self.norm2, self.mlp = nn.RMSNorm(8), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(12, 8), Block()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embedding(tokens))))


def feed_forward() -> Results:
    torch.manual_seed(0)
    plan = {"gate": ColwiseParallel(), "up": TheSameColwiseParallel(), "down": RowwiseParallel()}
    model = the_same_parallelize_module(FeedForward(), line(), plan)
    return [where(model.up.weight), where(model.down.weight), *train(model, torch.arange(24.0).reshape(3, 8) / 24)]


def _sequence_parallel(model: LanguageModel, mesh: DeviceMesh, head: ParallelStyle) -> nn.Module:
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm1": SequenceParallel(),
        "block.attention": gathered,
        "block.attention.[qkv]": ColwiseParallel(),
        "block.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "block.norm2": SequenceParallel(),
        "block.mlp": gathered,
        "block.mlp.gate": ColwiseParallel(),
        "block.mlp.up": ColwiseParallel(),
        "block.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": head,
    }
    return parallelize_module(model, mesh, plan)


def _tokens() -> torch.Tensor:
    return torch.arange(16).reshape(2, 8) * 5 % 12


def sequence_parallel_language_model() -> Results:
    torch.manual_seed(0)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return train(_sequence_parallel(LanguageModel(), line(), head), _tokens())


def loss_parallel_language_model() -> Results:
    torch.manual_seed(0)
    head = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    model, found = _sequence_parallel(LanguageModel(), line(), head), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for reduction in ("mean", "sum"):
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(_tokens())
            loss = F.cross_entropy(logits.flatten(0, 1), _tokens().flatten().roll(1), reduction=reduction)
            loss.backward()
        optimizer.step()
        found += [whole(loss), where(logits)]
    return [*found, *wholes(model)]


class Doubled(ParallelStyle):
    """A style of one's own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=lambda module, inputs, mesh: DTensor.from_local(inputs[0] * 2, mesh, [Replicate()]),
            output_fn=lambda module, outputs, mesh: outputs.to_local(),
        )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x) * scale, scale


def inputs_and_outputs_laid_out() -> Results:
    mesh = line()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh, {"0": Doubled()})
    found: Results = [model(torch.ones(2, 4)).detach()]
    wrapped = parallelize_module(
        TwoInputs(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            input_kwarg_layouts={"scale": Shard(0)},
            desired_input_kwarg_layouts={"scale": Replicate()},
            use_local_input=True,
            output_layouts=(Replicate(), Replicate()),
            desired_output_layouts=(Shard(0), Replicate()),
            use_local_output=True,
        ),
    )
    found += [one.detach() for one in wrapped(torch.ones(2, 4), scale=torch.full((2, 4), 2.0))]
    out = parallelize_module(
        nn.Linear(4, 4), mesh, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    )
    return [*found, out(torch.ones(4, 4)).detach()]


def tensor_parallel_beside_data_parallel() -> Results:
    mesh = grid()
    torch.manual_seed(0)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(FeedForward(), mesh["tp"], plan)
    batch = torch.arange(32.0).reshape(4, 8).chunk(2)[mesh.get_local_rank("dp")] / 32
    model(batch).square().mean().backward()
    found: Results = []
    for _, parameter in sorted(model.named_parameters()):
        local = parameter.grad.to_local().clone()
        found.append(DTensor.from_local(local, mesh["dp"], [Partial("avg")]).full_tensor())
    return found


# ---- experimental and debug


def functions_of_local_tensors() -> Results:
    mesh = line()

    def multiplied(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return a @ b * scale

    a = distribute_tensor(torch.arange(32.0).reshape(4, 8) / 32, mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(torch.arange(40.0).reshape(8, 5) / 40, mesh, [Shard(0)]).requires_grad_()
    layouts = ([Shard(1)], [Shard(0)], None)
    product = local_map(multiplied, out_placements=[Partial()], in_placements=layouts, device_mesh=mesh)(a, b, 2.0)
    product.redistribute(placements=[Replicate()]).sum().backward()
    rows = local_map(
        lambda x: (x.exp(), x.sum(0, keepdim=True)),
        out_placements=([Shard(0)], [Shard(0)]),
        in_placements=([Shard(0)],),
        device_mesh=mesh,
        redistribute_inputs=True,
    )(a.detach())
    return [whole(product), whole(a.grad), whole(b.grad), *(whole(row) for row in rows), where(product)]


def _scaled_difference() -> Callable[..., torch.Tensor]:
    name = f"interop_{DTensor.__module__.split('.')[0]}"

    @torch.library.custom_op(f"{name}::scaled_difference", mutates_args=())
    def scaled_difference(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return (a - b) * scale

    @scaled_difference.register_fake
    def _(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.empty_like(a)

    return getattr(torch.ops, name).scaled_difference.default


def a_rule_of_ones_own() -> Results:
    mesh, operation = line(), _scaled_difference()

    @register_sharding(operation)
    def rule(a: DTensor, b: DTensor, scale: float) -> list[tuple[list[Placement], list[Placement | None]]]:
        cut = [([Shard(d)], [Shard(d), Shard(d), None]) for d in range(a.ndim)]
        return [*cut, ([Replicate()], [Replicate(), Replicate(), None])]

    a = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    found = operation(a, b, 3.0)
    both = operation(a.redistribute(placements=[Shard(1)]), b, 0.5)
    return [whole(found), where(found), whole(both)]


def plain_tensors_beside() -> Results:
    x = distribute_tensor(torch.arange(8.0).reshape(4, 2), line(), [Shard(0)])
    with implicit_replication():
        return [whole(x + torch.ones(4, 2)), whole(torch.ones(3, 4) @ x)]


def counted_communication() -> Results:
    torch.manual_seed(0)
    mesh = line()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(FeedForward(), mesh, plan)
    with CommDebugMode() as forward:
        loss = model(torch.ones(3, 8)).sum()
    with CommDebugMode() as moved:
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)], src_data_rank=None).redistribute(placements=[Replicate()])
    loss.backward()
    return [forward.get_total_counts(), moved.get_total_counts(), len(moved.get_comm_counts())]


# ---- sharded tensors


def _placements() -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]


def _described(tensor: ShardedTensor) -> Results:
    entries = [[e.shard_offsets, e.shard_sizes, str(e.placement)] for e in tensor.metadata().shards_metadata]
    return [list(tensor.size()), sorted(entries), *(shard.tensor.detach().clone() for shard in tensor.local_shards())]


def sharded_factories() -> Results:
    spec = ChunkShardingSpec(dim=0, placements=_placements())
    other = ChunkShardingSpec(dim=1, placements=list(reversed(_placements())))
    made = [
        sharded_tensor.zeros(spec, 10, 3),
        sharded_tensor.ones(other, 5, 9, dtype=torch.float64),
        sharded_tensor.full(spec, (6, 2), 4.0),
    ]
    return [item for tensor in made for item in _described(tensor)]


def sharded_on_a_part_of_the_ranks() -> Results:
    group = dist.new_group([1, 2])
    tensor = sharded_tensor.zeros(ChunkShardingSpec(0, _placements()[1:3]), 4, 4, process_group=group)
    return _described(tensor)


def sharded_from_local_shards() -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [TensorShard.from_tensor_and_offsets(torch.full((2, 4), float(rank)), [2 * rank, 0], rank)]
    known, counted = init_from_local_shards(mine, 2 * size, 4), init_from_local_shards(mine, None, None)
    out = torch.empty(2 * size, 4) if rank == 0 else None
    known.gather(0, out)
    return [*_described(known), *_described(counted), *([out] if rank == 0 else [])]


def sharded_and_resharded() -> Results:
    torch.manual_seed(0)
    layer = nn.Linear(6, 8)
    shard_parameter(layer, "weight", ChunkShardingSpec(0, _placements()))
    found = _described(layer.weight)
    layer.weight.reshard(ChunkShardingSpec(0, list(reversed(_placements()))))
    return [*found, *_described(layer.weight), sorted(layer.state_dict())]


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(9, 4), nn.EmbeddingBag(7, 4, mode="sum")

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.words(indices).sum(1) + self.bags(indices % 7)


class RowsOnAllRanks(ShardingPlanner):
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        spec = ChunkShardingSpec(0, _placements())
        return ShardingPlan(plan={f"{name}.weight": spec for name, _ in module.named_children()})


def sharded_tables() -> Results:
    torch.manual_seed(0)
    model = Tables()
    shard_module(model, RowsOnAllRanks().build_plan(model))
    indices = torch.arange(6).reshape(2, 3) + dist.get_rank() % 2
    return [model(indices).detach(), *_described(model.words.weight), sorted(model.state_dict())]


def sharded_anyhow() -> Results:
    quarters = [
        ShardMetadata([row * 2, column * 3], [2, 3], f"rank:{2 * row + column}/cpu")
        for row in (0, 1)
        for column in (0, 1)
    ]
    return _described(sharded_tensor.ones(EnumerableShardingSpec(quarters), 4, 6))


def an_optimizer_of_sharded_parameters() -> Results:
    torch.manual_seed(0)
    layer = nn.Linear(6, 8)
    shard_parameter(layer, "weight", ChunkShardingSpec(0, _placements()))
    parameters = dict(named_params_with_sharded_tensor(layer))
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.5)
    for shard in layer.weight.local_shards():
        shard.tensor.grad = torch.ones_like(shard.tensor)
    layer.bias.grad = torch.ones_like(layer.bias)
    optimizer.step()
    return [*_described(layer.weight), layer.bias.detach(), sorted(parameters)]


PROGRAMS = [
    layouts_and_redistribution, two_axes, operations_and_gradients, factories, parameters_and_local_tensors,
    writing_into_what_came_from_local, a_module_by_hand, the_old_forms_of_input_and_output_functions,
    a_module_that_begins_on_the_meta_device, clipping_and_optimizers, saved_and_loaded, checkpointed, feed_forward,
    sequence_parallel_language_model, loss_parallel_language_model, inputs_and_outputs_laid_out,
    tensor_parallel_beside_data_parallel, functions_of_local_tensors, a_rule_of_ones_own, plain_tensors_beside,
    counted_communication, sharded_factories, sharded_on_a_part_of_the_ranks, sharded_from_local_shards,
    sharded_and_resharded, sharded_tables, sharded_anyhow, an_optimizer_of_sharded_parameters,
]  # fmt: skip
