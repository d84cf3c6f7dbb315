"""Modules, optimizers, clipping, scaling, copies and state dicts with DTensor parameters, against single-device
training.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import (
    DTensor,
    MaskPartial,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_module,
    distribute_tensor,
)


def on_mesh(body: Callable[..., Any], *shape: int) -> list[Any]:
    shape = shape or (2,)
    size = 1
    for n in shape:
        size *= n
    return comm.simulate(size).run(lambda group: body(init_device_mesh("cpu", shape)))


def sharded(module: nn.Module, mesh: Any, plan: Callable[[str, Tensor], Any]) -> nn.Module:
    """``module`` with every parameter laid out as ``plan`` says."""

    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        for key, parameter in list(part._parameters.items()):
            if parameter is not None:
                placed = distribute_tensor(parameter.detach(), mesh, plan(f"{name}.{key}", parameter))
                part.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))

    return distribute_module(module, mesh, partition)


def mixed(name: str, parameter: Tensor) -> list[Any]:
    return [Shard(len(name) % parameter.dim())] if parameter.dim() else [Replicate()]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)  # before a batch norm its gradient is noise
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 4 * 4, 5)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(x.flatten(1))


def transformer() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.LayerNorm(8),
        nn.Linear(8, 11),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))


def batch(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if kind == "conv":
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)
    if kind == "transformer":
        tokens = torch.randint(0, 11, (4, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "conv": ConvNet, "transformer": transformer}


def losses(model: nn.Module, x: Any, y: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("layout", ["batch", "mixed", "replicated"])
def test_training_matches_one_device(kind: str, layout: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    x, y = batch(kind)
    expected = losses(copy.deepcopy(model), x, y)

    def body(mesh: Any) -> list[float]:
        plan = mixed if layout == "mixed" else lambda name, p: [Replicate()]
        mine = sharded(copy.deepcopy(model), mesh, plan)
        how = [Shard(0)] if layout == "batch" else [Replicate()]
        return losses(mine, distribute_tensor(x, mesh, how), distribute_tensor(y, mesh, how))

    for found in on_mesh(body, 2):
        assert found == pytest.approx(expected, rel=2e-4)


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
}


HAS_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
VARIANTS = [(n, v) for n in OPTIMIZERS for v in ("foreach", "for-loop", "fused") if v != "fused" or n in HAS_FUSED]


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=str)
def test_every_optimizer_takes_the_same_steps(name: str, variant: str) -> None:
    options = dict(OPTIMIZERS[name])
    options.update({"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}[variant])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(5, 4)

    def train(net: nn.Module, data: Any) -> list[Any]:
        optimizer = getattr(torch.optim, name)(net.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            net(data).square().sum().backward()
            optimizer.step()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]

    expected = train(copy.deepcopy(model), x)

    def body(mesh: Any) -> list[Any]:
        net = sharded(copy.deepcopy(model), mesh, lambda key, p: [Shard(0)] if p.dim() == 2 else [Replicate()])
        return train(net, distribute_tensor(x, mesh, [Shard(0)]))

    for found in on_mesh(body, 2):
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_same_steps(search: str | None) -> None:
    """In float64: a line search that rounds otherwise may stop elsewhere."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)

    def train(net: nn.Module, data: Any) -> list[Any]:
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(data).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]

    expected = train(copy.deepcopy(model), x)

    def body(mesh: Any) -> list[Any]:
        net = sharded(copy.deepcopy(model), mesh, lambda key, p: [Shard(0)] if p.dim() == 2 else [Replicate()])
        return train(net, distribute_tensor(x, mesh, [Shard(0)]))

    for found in on_mesh(body, 2):
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, reference)


def test_muon_takes_the_step_of_one_device() -> None:
    """It rounds to eight bits inside, and amplifies what was rounded: only the same computation is close."""
    generator = torch.Generator().manual_seed(1)
    value, grad = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)

    def step(parameter: nn.Parameter, gradient: Any) -> Any:
        parameter.grad = gradient
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0).step()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    expected = step(nn.Parameter(value.clone()), grad.clone())

    def body(mesh: Any) -> None:
        for placement in (Replicate(), Shard(0), Shard(1)):
            mine = nn.Parameter(distribute_tensor(value, mesh, [placement]))
            found = step(mine, distribute_tensor(grad, mesh, [placement]))
            assert torch.equal(found, expected), placement

    assert (expected - value).abs().max() > 0.3
    on_mesh(body, 2)


def test_sparse_adam_refuses() -> None:
    """It takes sparse gradients only, which a DTensor has none of."""

    def body(mesh: Any) -> None:
        table = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        optimizer = torch.optim.SparseAdam([table])
        F.embedding(distribute_tensor(torch.tensor([1, 2]), mesh), table).sum().backward()
        with pytest.raises(RuntimeError, match="does not support dense gradients"):
            optimizer.step()
        with pytest.raises(NotImplementedError, match=r"Pass sparse=False.*not SparseAdam"):
            F.embedding(distribute_tensor(torch.tensor([1, 2]), mesh), table, sparse=True)

    on_mesh(body, 2)


def test_an_infinite_gradient_on_one_rank_makes_every_rank_skip_the_step() -> None:
    def body(mesh: Any) -> None:
        weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor, kept, scale in ((float("inf"), 1.0, 4.0), (1.0, 0.9, 4.0)):
            optimizer.zero_grad()
            data = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, factor]), mesh, [Shard(0)])
            scaler.scale((weight * data).sum()).backward()
            assert weight.grad is not None
            here = bool(weight.grad.to_local().isfinite().all())
            assert here == (mesh.get_rank() == 0 or factor == 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert weight.to_local().tolist() == pytest.approx([kept, kept])
            assert scaler.get_scale() == scale

    on_mesh(body, 2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_is_global_under_every_placement(norm_type: float, foreach: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(6, 4, generator=generator) for _ in range(4)]
    plain = [nn.Parameter(v.clone()) for v in values]
    for p, v in zip(plain, values, strict=True):
        p.grad = v.clone() * 3
    expected = nn.utils.clip_grad_norm_(plain, 1.5, norm_type, foreach=foreach)

    def body(mesh: Any) -> None:
        layouts = [
            [Shard(0), Shard(1)],
            [Replicate(), Shard(0)],
            [Replicate(), Replicate()],
            [Shard(1), Shard(1)],
        ]
        mine = []
        for v, placements in zip(values, layouts, strict=True):
            p = nn.Parameter(distribute_tensor(v, mesh, placements))
            p.grad = distribute_tensor(v * 3, mesh, placements)
            mine.append(p)
        total = nn.utils.clip_grad_norm_(mine, 1.5, norm_type, foreach=foreach)
        torch.testing.assert_close(total.full_tensor(), expected)
        for p, reference in zip(mine, plain, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), reference.grad)

    on_mesh(body, 2, 2)


def test_norm_of_a_partial_tensor_is_that_of_its_sum() -> None:
    def body(mesh: Any) -> float:
        local = torch.full((4,), float(mesh.get_rank() + 1))
        return float(torch.linalg.vector_norm(DTensor.from_local(local, mesh, [Partial()])))

    assert on_mesh(body, 2) == [pytest.approx(6.0)] * 2


def test_state_dict_deepcopy_pickle_and_to() -> None:
    torch.manual_seed(3)
    model = mlp()

    def body(mesh: Any) -> None:
        mine = sharded(copy.deepcopy(model), mesh, mixed)
        assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in mine.parameters())
        twin = copy.deepcopy(mine)
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert a.placements == b.placements
            assert a._local.data_ptr() != b._local.data_ptr()
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        twin.load_state_dict(mine.state_dict())
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b.full_tensor())
        again = pickle.loads(pickle.dumps(mine.state_dict()["0.weight"]))
        torch.testing.assert_close(again.full_tensor(), mine[0].weight.full_tensor().detach())
        assert again.placements == mine[0].weight.placements
        buffer = io.BytesIO()
        torch.save(mine.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        torch.testing.assert_close(loaded["2.bias"].full_tensor(), mine[2].bias.full_tensor().detach())
        halved = mine.to(torch.float64)
        assert halved[0].weight.dtype == torch.float64
        assert halved[0].weight._local.dtype == torch.float64
        assert isinstance(halved[0].weight, nn.Parameter)

    on_mesh(body, 2)


def test_files_of_any_layout_are_loaded_without_unpickling() -> None:
    def body(mesh: Any) -> None:
        layouts = [
            (Shard(0), Replicate()), (Partial("avg"), Shard(-1)), (MaskPartial(), Replicate()),
            (StridedShard(0, split_factor=2), Shard(0)),
        ]  # fmt: skip
        whole = torch.arange(24.0).reshape(4, 6)
        replica = distribute_tensor(whole, mesh)
        given = {str(i): replica.redistribute(placements=layout) for i, layout in enumerate(layouts)}
        given["sub-mesh"] = distribute_tensor(whole, mesh["b"], [Shard(1)])
        given["flat"] = nn.Parameter(distribute_tensor(whole, mesh._flatten("ab"), [Shard(0)]))
        buffer = io.BytesIO()
        torch.save(given, buffer)
        buffer.seek(0)
        for name, tensor in torch.load(buffer, weights_only=True).items():
            assert tensor.placements == given[name].placements
            assert tensor.device_mesh == given[name].device_mesh
            assert type(tensor) is DTensor
            assert isinstance(tensor, nn.Parameter) is (name == "flat")
            assert torch.equal(tensor._local, given[name]._local)

    comm.simulate(4).run(lambda group: body(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))))


def test_grad_scaler_and_autocast() -> None:
    torch.manual_seed(4)
    model = mlp()
    x, y = batch("mlp")

    def train(net: nn.Module, data: Any, target: Any) -> tuple[list[Any], torch.dtype]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(data)
            loss = F.cross_entropy(out, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()], out.dtype

    expected, dtype = train(copy.deepcopy(model), x, y)

    def body(mesh: Any) -> Any:
        mine = sharded(copy.deepcopy(model), mesh, lambda key, p: [Replicate()])
        return train(mine, distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Shard(0)]))

    for found, found_dtype in on_mesh(body, 2):
        assert found_dtype == dtype == torch.bfloat16
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 6, batch_first=True),
        lambda: nn.GRU(4, 6, num_layers=2, batch_first=True),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: nn.Conv1d(5, 3, 3, padding=1),
        lambda: nn.GroupNorm(5, 5),
        lambda: nn.Bilinear(4, 4, 3),
        lambda: nn.RMSNorm(4),
        lambda: nn.PReLU(),
    ],
    ids=["LSTM", "GRU", "MultiheadAttention", "Conv1d", "GroupNorm", "Bilinear", "RMSNorm", "PReLU"],
)
def test_unmodified_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(6)
    module = make()
    x = torch.randn(2, 5, 4)

    def run(net: nn.Module, data: Any) -> list[Any]:
        copies = {"MultiheadAttention": 3, "Bilinear": 2}.get(type(net).__name__, 1)
        out = net(*[data] * copies)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (out, *(p.grad for p in net.parameters()))]

    expected = run(copy.deepcopy(module), x)

    def body(mesh: Any) -> list[Any]:
        mine = sharded(copy.deepcopy(module), mesh, mixed)
        return run(mine, distribute_tensor(x, mesh, [Shard(0)]))

    for found in on_mesh(body, 2):
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_training_does_not_grow() -> None:
    def body(mesh: Any) -> list[int]:
        from phalanx.tensor.dispatch import _run

        torch.manual_seed(0)
        net = sharded(mlp(), mesh, mixed)
        optimizer = torch.optim.AdamW(net.parameters())
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
        sizes = []
        for step in range(60):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
            if step in (5, 59):
                sizes.append(len(_run._cache))
        return sizes

    for first, last in on_mesh(body, 2):
        assert first == last
