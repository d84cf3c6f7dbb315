"""A small decoder with rotary positions, as a user would write it, and its run on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 32, 16, 4, 2


def rotary_table(length: int, width: int = WIDTH // HEADS) -> Tensor:
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.cos(), angles.sin()])  # (2, positions, width / 2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH // HEADS * KEY_HEADS)
        self.value = nn.Linear(WIDTH, WIDTH // HEADS * KEY_HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = rotate(q, table), rotate(k, table)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), table)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, length: int, *, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", rotary_table(length))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.head(x)


def batch(length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels: two views of one tensor, as they nearly always are."""
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, labels: Tensor, num_tokens: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens


def on_one_device(length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients."""
    model, (ids, labels) = Decoder(length), batch(length)
    logits = model(ids)
    loss_of(logits, labels, labels.numel()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
