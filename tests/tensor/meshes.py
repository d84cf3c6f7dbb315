"""Running a test body on a mesh of simulated ranks, and the small models that several tests train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import comm
from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.tensor import DTensor

AXES = ("dp", "tp", "pp")


def on_mesh(body: Callable[[DeviceMesh], Any], *shape: int, timeout: float = 100.0) -> list[Any]:
    """``body(mesh)`` on every rank of a mesh with axes dp, tp, ... (one axis: tp)."""
    names = ("tp",) if len(shape) == 1 else AXES[: len(shape)]
    return comm.simulate(math.prod(shape), timeout=timeout).run(
        lambda group: body(init_device_mesh("cpu", shape, mesh_dim_names=names))
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class MLP(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention whose head count follows from the width of what its projections return."""

    def __init__(self, width: int = 8, head_width: int = 2) -> None:
        super().__init__()
        self.head_width = head_width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length = x.shape[:2]
        parts = [layer(x) for layer in (self.query, self.key, self.value)]
        heads = [part.view(batch, length, -1, self.head_width).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int = 8, head_width: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.mlp = MLP(width, 2 * width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by parameter name."""
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
