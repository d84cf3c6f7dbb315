"""A plain torch.distributed training script: runs unchanged under torchrun and under ``phalanx run``.

Each worker fits a small model to the same line on its own share of the data; gradients are averaged by hand, so that
nothing but the launcher is on show. It saves its progress after every step and goes on from there when it is restarted.

    phalanx run --nproc-per-node 2 --max-restarts 3 examples/launch/train.py --steps 200
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.launch import report_progress


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--state", type=Path, default=None, help="where to keep progress between restarts")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = load(args.state, model)
    for step in range(first, args.steps):
        x = torch.rand(32, 1, generator=torch.Generator().manual_seed(step * size + rank))
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        report_progress(step)  # lets --hang-timeout tell a slow worker from a stuck one
        if args.state and rank == 0:
            save(args.state, model, step + 1)
    if rank == 0:
        weight, bias = model.weight.item(), model.bias.item()
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"{size} workers, {restarts} restarts: y = {weight:.2f} x + {bias:.2f}, loss {loss.item():.2e}")
    dist.destroy_process_group()


def save(path: Path, model: torch.nn.Module, step: int) -> None:
    temporary = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "step": step}, temporary)
    temporary.replace(path)


def load(path: Path | None, model: torch.nn.Module) -> int:
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    return int(state["step"])


if __name__ == "__main__":
    main()
