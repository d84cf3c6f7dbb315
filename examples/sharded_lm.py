"""A character transformer that no rank holds whole: a block is gathered only while it computes.

phalanx run --nproc-per-node 4 examples/sharded_lm.py --steps 100 --out run      # trains and saves
phalanx run --nproc-per-node 2 examples/sharded_lm.py --steps 200 --out run      # goes on, on other ranks than before
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import phalanx
from phalanx import shard
from phalanx.fsdp import fully_shard

CONTEXT, WIDTH, LAYERS = 64, 128, 4


class CharModel(nn.Module):
    def __init__(self, num_chars: int) -> None:
        super().__init__()
        self.chars = nn.Embedding(num_chars, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, num_chars)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        x = self.chars(codes) + self.places(torch.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer, done: torch.Tensor) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds; each rank writes and reads its own shards."""
    found = {"steps": done, **model.state_dict()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="directory of the checkpoint: gone on with if it is there")
    args = parser.parse_args()

    group = phalanx.init()
    text = (Path(__file__).parent / "data" / "harbour.txt").read_text()
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(char) for char in text])

    with torch.device("meta"):  # no rank ever has room for the whole
        model = CharModel(len(alphabet))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():  # values belong to elements: the same on any number of ranks
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
        else:
            nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    done = torch.tensor(0)
    if args.out and args.out.exists():
        for parameter in model.parameters():  # a step, so that the optimizer has a state to be filled
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        shard.load(args.out, tensors_of(model, optimizer, done))

    for step in range(int(done), args.steps):
        chance = torch.Generator().manual_seed(step)  # 16 windows a step, whoever computes them
        starts = torch.randint(len(codes) - CONTEXT - 1, (16,), generator=chance)[group.rank :: group.size]
        windows = torch.stack([codes[start : start + CONTEXT + 1] for start in starts.tolist()])
        loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss = loss.detach()
    group.all_reduce(loss, "avg")
    if args.out:
        shard.save(tensors_of(model, optimizer, torch.tensor(args.steps)), args.out, overwrite=True)
    if group.rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"{args.steps} steps, loss {loss:.4f}; rank 0 holds {held} numbers")


if __name__ == "__main__":
    main()
