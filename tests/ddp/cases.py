"""Models and data that the DDP tests share. Small, seeded, with deterministic forward passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Has one weight above the size from which gradients are copied at once, and several below."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 160), nn.ReLU(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], 1, 2, 4).repeat(1, 1, 3, 2)
        return self.head(F.relu(self.norm(self.conv(x))).mean(dim=(2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.reshape(x.shape[0], 4, 2))).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


class Experts(nn.Module):
    """Uses one of three experts per call; the third only if asked for: which are used differs by rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.experts[which](torch.tanh(self.stem(x)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs() * 50).long() % 20
        return self.head(self.table(rows).mean(1))


DENSE = {"mlp": Mlp, "conv": ConvNet, "transformer": Transformer, "tied": Tied}


def make(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    # The number of threads is kept per thread, and bits depend on it: each simulated rank needs it set.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return kind()


def batch(step: int, rank: int, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 8, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.3).pow(2).mean()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if param.grad is None else param.grad.to_dense().clone() for name, param in module.named_parameters()
    }


def assert_same(actual: nn.Module, expected: nn.Module, what: str, *, exact: bool = True) -> None:
    """Same gradients (and None in the same places) and same weights and buffers."""
    left, right = gradients(actual), gradients(expected)
    assert left.keys() == right.keys()
    for name, grad in left.items():
        other = right[name]
        assert (grad is None) == (other is None), f"{what}: {name}.grad is {grad} but {other}"
        if grad is not None:
            _close(grad, other, f"{what}: gradient of {name}", exact)
    for (name, tensor), other in zip(actual.state_dict().items(), expected.state_dict().values(), strict=True):
        _close(tensor, other, f"{what}: {name}", exact)


def _close(left: Tensor, right: Tensor, what: str, exact: bool) -> None:
    torch.testing.assert_close(
        left, right, msg=lambda text: f"{what}: {text}", **({"rtol": 0, "atol": 0} if exact else {})
    )
