"""Small models and a training loop for the tests of ``fully_shard``, the same for torch's and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Uneven sizes, a parameter with fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 11)
        self.second = nn.Sequential(nn.Linear(11, 13), nn.GELU(), nn.Linear(13, 5))
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.register_buffer("shift", torch.full((5,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) * self.scale + self.shift

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(6, 5, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(5 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.unflatten(1, (1, 2, 3)), (3, 4, 4, 4))
        return self.head(self.body(self.stem(x)).flatten(1))

    def blocks(self) -> list[nn.Module]:
        return [self.stem, self.body]


class Block(nn.Module):
    """Pre-norm; keys have no bias, whose gradient is zero but for rounding, which Adam would blow up."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_in(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_out(x))))


class Transformer(nn.Module):
    """Four blocks; the embedding is also the last layer (``tied``) or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(19, 12), nn.Embedding(6, 12)
        self.layers = nn.ModuleList(Block(12, 2) for _ in range(4))
        self.norm, self.predict = nn.LayerNorm(12), nn.Linear(12, 19, bias=False)
        if tied:
            self.predict.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 19
        h = self.embed(tokens) + self.position.weight
        for layer in self.layers:
            h = layer(h)
        return self.predict(self.norm(h)).mean(1)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


def tied() -> Transformer:
    return Transformer(tied=True)


MODELS: dict[str, Callable[[], Any]] = {"mlp": MLP, "convnet": ConvNet, "transformer": Transformer, "tied": tied}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]()


def batch(step: int, rows: int = 24) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 + step))


@dataclass
class Run:
    """What a training run did."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def whole(tensor: Any) -> Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def train(
    model: Any,
    *,
    rank: int = 0,
    size: int = 1,
    steps: int = 10,
    accumulate: int = 1,
    make_optimizer: Any = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    around_forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    before_backward: Callable[[Any, bool], None] = lambda model, last: None,
    clip: float | None = None,
) -> Run:
    """Train on this rank's rows of each batch; losses are this rank's."""
    run, optimizer = Run(), make_optimizer(model.parameters())
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            x = batch(step * accumulate + micro).chunk(size)[rank]
            loss = around_forward(model, x).float().pow(2).mean() / accumulate
            before_backward(model, micro == accumulate - 1)
            loss.backward()
            total += loss.item()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        run.losses.append(total)
        run.gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: whole(value) for name, value in model.state_dict().items()}
    return run


def assert_runs_close(one: Run, other: Run, what: str, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    def close(a: Any, b: Any, name: str) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {name}: {text}")

    close(one.losses, other.losses, "losses")
    for step, (left, right) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        assert left.keys() == right.keys(), f"{what}: gradients of {left.keys() ^ right.keys()} in step {step}"
        for name in left:
            close(left[name], right[name], f"gradient of {name} in step {step}")
    assert one.weights.keys() == other.weights.keys()
    for name in one.weights:
        close(one.weights[name], other.weights[name], f"{name} at the end")


def assert_runs_near(one: Run, other: Run, what: str, limit: float = 2e-2) -> None:
    """Apart by a few roundings of bfloat16, measured by the size of each tensor: gradients in the first step, before
    Adam makes large steps of small differences, then the losses and the weights that come of them."""

    def near(a: Tensor, b: Tensor, name: str, limit: float) -> None:
        apart, size = (a - b).float().norm().item(), b.float().norm().item()
        assert apart <= limit * size, f"{what}: {name} is apart by {apart:g}, its size is {size:g}"

    assert one.gradients[0].keys() == other.gradients[0].keys(), what
    for name, gradient in one.gradients[0].items():
        near(gradient, other.gradients[0][name], f"gradient of {name} in step 0", limit)
    torch.testing.assert_close(one.losses, other.losses, rtol=5e-2, atol=0, msg=lambda text: f"{what}: losses: {text}")
    assert one.weights.keys() == other.weights.keys(), what
    for name, weight in one.weights.items():
        near(weight, other.weights[name], f"{name} at the end", 2 * limit)
