"""A small character transformer, trained elastically: kill any worker, nothing is lost.

python examples/char_lm.py                                                        # one process
phalanx run --nproc-per-node 3 --on-failure heal examples/char_lm.py --steps 300  # three, and any may die
phalanx run --nproc-per-node 3 --on-failure heal examples/char_lm.py --shard      # and none holds the whole model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import phalanx.elastic
from phalanx.fsdp import fully_shard

CONTEXT = 64


class Text(torch.utils.data.Dataset):
    """Windows of a text: CONTEXT characters, and the same shifted by one."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.alphabet = sorted(set(text))
        number = {char: i for i, char in enumerate(self.alphabet)}
        self.codes = torch.tensor([number[char] for char in text])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class CharModel(nn.Module):
    """Embedding, causal transformer blocks, and a prediction for the next character."""

    def __init__(self, num_chars: int, width: int = 96, num_layers: int = 2) -> None:
        super().__init__()
        self.chars = nn.Embedding(num_chars, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_chars)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        x = self.chars(codes) + self.places.weight[: codes.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "data" / "harbour.txt")
    parser.add_argument("--shard", action="store_true", help="share the model out: every part on two workers")
    parser.add_argument("--out", type=Path, help="directory for logs, saves and the result")
    args = parser.parse_args()

    torch.manual_seed(0)
    dataset = Text(args.text)
    model = CharModel(len(dataset.alphabet))
    if args.shard:
        for block in model.blocks.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    job = phalanx.elastic.Job(
        model,
        optimizer,
        dataset,
        num_slots=12,
        slot_batch_size=4,
        seed=0,
        copies=2 if args.shard else "all",
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps),
        saves=phalanx.elastic.Saves(directory=args.out / "saves", every=50) if args.out else None,
        run=phalanx.elastic.RunOptions(log_dir=args.out and args.out / "logs", threads=1),
    )
    for step in job.steps(max_steps=args.steps):
        for micro in step:
            logits = model(micro.inputs)
            micro.backward(F.cross_entropy(logits.flatten(0, 1), micro.targets.flatten()))
        step.commit(max_grad_norm=1.0)

    digest = job.digest()
    if job.rank == 0:
        print(f"{job.step} steps, loss {job.loss:.4f}, digest {digest}")
        if args.out:
            (args.out / "result").write_text(f"{job.loss} {digest}")


if __name__ == "__main__":
    main()
