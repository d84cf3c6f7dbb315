"""Programs that run on phalanx.tensor and on torch.distributed.tensor alike; ``test_torch_parity.py`` compares them.

``t`` holds the names of either library. Gradients of parameters are compared whole: torch may leave them partial, ours
are laid out as their parameter. Styles work on one axis: the last of the mesh.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from meshes import MLP, Attention
from torch import nn


def whole_gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }


def layouts(t: SimpleNamespace, mesh: Any, num_dims: int) -> list[list[Any]]:
    """All placements of Shard and Replicate on the mesh."""
    one = [t.Replicate(), *(t.Shard(d) for d in range(num_dims))]
    return [[a] for a in one] if mesh.ndim == 1 else [[a, b] for a in one for b in one]


def some_layouts(t: SimpleNamespace, mesh: Any) -> list[list[Any]]:
    """All on one axis; on two, some of each kind (torch takes its time for each)."""
    if mesh.ndim == 1:
        return layouts(t, mesh, 2)
    whole, rows, columns = t.Replicate(), t.Shard(0), t.Shard(1)
    return [[rows, columns], [whole, rows], [columns, columns], [rows, whole]]


def last_axis(mesh: Any) -> Any:
    return mesh if mesh.ndim == 1 else mesh["tp"]


def distribute(t: SimpleNamespace, mesh: Any) -> Any:
    """distribute_tensor and full_tensor under every layout, of even, uneven and tiny tensors."""
    made = [
        t.distribute_tensor(torch.randn(shape), mesh, placements)
        for shape in [(8, 4), (5, 3), (1, 7)]
        for placements in layouts(t, mesh, 2)
    ]
    return [made, [x.full_tensor() for x in made], [tuple(x.shape) for x in made]]


def redistribute(t: SimpleNamespace, mesh: Any) -> Any:
    """Layouts to layouts, uneven, with the gradient."""
    value, found = torch.randn(5, 6), []
    for source in some_layouts(t, mesh):
        for target in some_layouts(t, mesh):
            x = t.distribute_tensor(value, mesh, source).requires_grad_()
            y = x.redistribute(mesh, target)
            y.to_local().square().sum().backward()
            found += [y, x.grad]
    return found


def redistribute_in_other_dtypes(t: SimpleNamespace, mesh: Any) -> Any:
    """What travels there and what travels back is rounded as torch rounds it."""
    value, weights, found = torch.randn(5, 6), torch.randn(5, 6), []
    target = [t.Shard(1)] * mesh.ndim
    for source in some_layouts(t, mesh):
        for dtypes in [(torch.bfloat16, None), (None, torch.bfloat16), (torch.bfloat16, torch.float32)]:
            x = t.distribute_tensor(value, mesh, source).requires_grad_()
            y = x.redistribute(mesh, target, forward_dtype=dtypes[0], backward_dtype=dtypes[1])
            y.backward(t.distribute_tensor(weights.to(y.dtype), mesh, target))
            found += [y, x.grad]
    return found


def partial_sums(t: SimpleNamespace, mesh: Any) -> Any:
    """from_local of partial values, reduced to replicas and to shards."""
    local = torch.arange(12.0).view(4, 3) * (mesh.get_rank() + 1)
    found = []
    for op in ("sum", "avg", "max", "min"):
        x = t.DTensor.from_local(local, mesh, [t.Replicate()] * (mesh.ndim - 1) + [t.Partial(op)], run_check=False)
        if mesh.ndim > 1:  # replicas must agree, so cut by the first axis instead
            x = t.DTensor.from_local(local, mesh, [t.Shard(0), t.Partial(op)], run_check=False)
        first = x.placements[0] if mesh.ndim > 1 else None
        rest = [first] if first is not None else []
        found += [x.redistribute(mesh, [*rest, t.Replicate()])]
        if op in ("sum", "avg"):
            found += [x.redistribute(mesh, [*rest, t.Shard(1)])]
    return found


def from_local(t: SimpleNamespace, mesh: Any) -> Any:
    """Even shards with their gradient, and uneven ones with a given shape."""
    local = (torch.ones(2, 3) * mesh.get_rank()).requires_grad_()
    x = t.DTensor.from_local(local, mesh, [t.Shard(0)] * mesh.ndim, run_check=False)
    (x * x).sum().backward()
    cut = t.distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [t.Shard(0)] * mesh.ndim)
    again = t.DTensor.from_local(
        cut.to_local(), mesh, cut.placements, run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    return [x, local.grad, again, again.full_tensor()]


def factories(t: SimpleNamespace, mesh: Any) -> Any:
    found = []
    for placements in layouts(t, mesh, 2):
        options = {"device_mesh": mesh, "placements": placements}
        found += [
            t.zeros(5, 4, **options),
            t.ones((5, 4), dtype=torch.int32, **options),
            t.full((5, 4), 2.5, **options),
        ]
        found += [torch.zeros_like(found[-1]), torch.ones_like(found[-1]), torch.full_like(found[-1], 3.0)]
        empty = t.empty(5, 4, **options)
        found += [(tuple(empty.shape), tuple(empty.to_local().shape), empty.dtype)]
    return found


OPERATIONS = {
    "add": lambda x, y: x + y,
    "mul and scalar": lambda x, y: 2 * x * y - 1,
    "divide": lambda x, y: x / (y.abs() + 1),
    "matmul": lambda x, y: x @ y.t(),
    "relu": lambda x, y: F.relu(x) + F.gelu(y),
    "sum": lambda x, y: x.sum(),
    "sum of dim": lambda x, y: x.sum(1, keepdim=True) * y,
    "mean": lambda x, y: (x * y).mean(0),
    "softmax": lambda x, y: x.softmax(-1) * y,
    "log_softmax": lambda x, y: F.log_softmax(x, 0) + y,
    "layer_norm": lambda x, y: F.layer_norm(x, (12,)) * y,
    "transpose": lambda x, y: x.t() @ y,
    "view": lambda x, y: (x * y).view(8, 4, 3).sum(2),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "split": lambda x, y: torch.stack(x.split(6, 1)).sum(0) * torch.stack(y.chunk(2, 1)).sum(0),
    "unsqueeze": lambda x, y: x.unsqueeze(1) * y.unsqueeze(0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": lambda x, y: x.clamp(min=-0.5) + y.tanh() + y.sigmoid(),
    "max": lambda x, y: x.amax(1) + y.amax(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x) * y.sum(),
    "pow": lambda x, y: x.pow(2) + y.exp().log(),
}


def operations(t: SimpleNamespace, mesh: Any) -> Any:
    """Common operations, forward and backward, on every pair of equal layouts and on mixed ones."""
    a, b = torch.randn(8, 12), torch.randn(8, 12)
    pairs = [(p, p) for p in some_layouts(t, mesh)]
    pairs += [([t.Shard(0)] * mesh.ndim, [t.Replicate()] * mesh.ndim)]
    pairs = pairs if mesh.ndim == 1 else pairs[-3:]
    found = {}
    for index, (left, right) in enumerate(pairs):
        for name, act in OPERATIONS.items():
            x = t.distribute_tensor(a, mesh, left).requires_grad_()
            y = t.distribute_tensor(b, mesh, right).requires_grad_()
            out = act(x, y)
            (out * out).sum().backward()
            grads = [None if v.grad is None else v.grad.full_tensor() for v in (x, y)]
            found[f"{name} {index}"] = [out.full_tensor(), grads]
    return found


def modules(t: SimpleNamespace, mesh: Any) -> Any:
    """distribute_module with a partition function, and three steps of an optimizer."""

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module._parameters.items()):
            how = [t.Shard(0)] * mesh.ndim
            module.register_parameter(key, nn.Parameter(t.distribute_tensor(p.detach(), mesh, how)))

    model = MLP(6, 10)
    t.distribute_module(model, mesh, partition)
    x = t.distribute_tensor(torch.randn(8, 6), mesh, [t.Shard(0)] * mesh.ndim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor())
    return [losses, [p.full_tensor() for p in model.parameters()]]


def styles(t: SimpleNamespace, mesh: Any) -> dict[str, Any]:
    """An MLP and an attention block: outputs, input gradients and weight gradients, then three steps of training."""
    col, row = t.styles.ColwiseParallel, t.styles.RowwiseParallel
    plans = {
        "mlp": (MLP(8, 12), {"up": col(), "down": row()}),
        "attention": (Attention(), {"query": col(), "key": col(), "value": col(), "out": row()}),
    }
    result: dict[str, Any] = {}
    for name, (model, plan) in plans.items():
        t.styles.parallelize_module(model, last_axis(mesh), plan)
        x = torch.randn(2, 3, 8, requires_grad=True)
        out = model(x)
        out.square().sum().backward()
        result[name] = [out, x.grad, whole_gradients(model)]
        # Not Adam: the gradient of a key's bias is rounding noise around zero, which Adam would scale up.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            model(x.detach()).square().mean().backward()
        result[f"trained {name}"] = dict(model.named_parameters())
    return result


def sequence_and_loss(t: SimpleNamespace, mesh: Any) -> Any:
    """Norm on parts of the sequence, whole inside the MLP, and a loss over cut classes."""
    s, mesh = t.styles, last_axis(mesh)
    model = nn.Sequential(nn.LayerNorm(6), MLP(6, 12), nn.Linear(6, 8))
    plan = {
        "0": s.SequenceParallel(),
        "1": s.PrepareModuleInput(input_layouts=t.Shard(1), desired_input_layouts=t.Replicate()),
        "1.up": s.ColwiseParallel(),
        "1.down": s.RowwiseParallel(),
        "2": s.ColwiseParallel(use_local_output=False),
    }
    s.parallelize_module(model, mesh, plan)
    logits = model(t.distribute_tensor(torch.randn(2, 4, 6), mesh, [t.Shard(1)]))
    target = t.distribute_tensor(torch.randint(0, 8, (2 * 4,)), mesh)
    with s.loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), target)
        loss.backward()
    return [logits, loss.full_tensor(), whole_gradients(model)]


def communication(t: SimpleNamespace, mesh: Any) -> Any:
    """How many collectives each step takes, as either library's CommDebugMode counts them."""
    mode, axis = t.debug.CommDebugMode, last_axis(mesh)
    plan = {"up": t.styles.ColwiseParallel(), "down": t.styles.RowwiseParallel()}
    model = t.styles.parallelize_module(MLP(8, 12), axis, plan)
    counts = []
    with mode() as seen:
        out = model(torch.randn(2, 8, requires_grad=True))
    counts.append(seen.get_total_counts())
    with mode() as seen:
        out.sum().backward()
    counts.append(seen.get_total_counts())
    x = t.distribute_tensor(torch.randn(8, 8), axis, [t.Shard(0)])
    part = t.DTensor.from_local(torch.ones(8, 8), axis, [t.Partial()], run_check=False)
    for tensor, target in ((x, t.Replicate()), (x, t.Shard(1)), (part, t.Replicate()), (part, t.Shard(0))):
        with mode() as seen:
            tensor.redistribute(axis, [target])
        counts.append(seen.get_total_counts())
    return [counts, out]


def embeddings(t: SimpleNamespace, mesh: Any) -> Any:
    """By rows and by columns."""
    s, found = t.styles, []
    indices = torch.tensor([[0, 6, 3], [3, 7, 1]])
    for style in (
        s.ColwiseParallel(output_layouts=t.Replicate()),
        s.RowwiseParallel(input_layouts=t.Replicate()),
    ):
        layer = s.parallelize_module(nn.Embedding(8, 4), last_axis(mesh), style)
        out = layer(indices)
        out.square().sum().backward()
        found += [out, layer.weight.grad.full_tensor()]
    return found


def local_maps(t: SimpleNamespace, mesh: Any) -> Any:
    """A row-parallel product by hand, with gradients."""
    cut, rest = [t.Replicate()] * (mesh.ndim - 1), [t.Replicate()] * (mesh.ndim - 1)
    product = t.experimental.local_map(
        lambda a, b: a @ b,
        out_placements=[*rest, t.Partial()],
        in_placements=([*cut, t.Shard(1)], [*cut, t.Shard(0)]),
        redistribute_inputs=True,
    )
    x = t.distribute_tensor(torch.randn(3, 8), mesh).requires_grad_()
    w = t.distribute_tensor(torch.randn(8, 2), mesh, [*cut, t.Shard(0)]).requires_grad_()
    out = product(x, w)
    out.redistribute(mesh, [t.Replicate()] * mesh.ndim).to_local().square().sum().backward()
    return [out.full_tensor(), x.grad.full_tensor(), w.grad]


PROGRAMS = {
    f.__name__: f
    for f in (
        distribute, redistribute, partial_sums, from_local, factories, operations, modules, styles, sequence_and_loss,
        communication, embeddings, local_maps, redistribute_in_other_dtypes,
    )
}  # fmt: skip
