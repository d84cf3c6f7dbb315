"""What processes of schedulers run: each adds its rank to a sum over all of them, and writes down what it knows.

``sum_of_ranks.py DIRECTORY``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import phalanx
from phalanx.world import World


def main() -> None:
    group = phalanx.init(timeout=120)
    total = torch.tensor([float(group.rank)])
    group.all_reduce(total)
    world = World.from_env()
    (Path(sys.argv[1]) / f"rank{group.rank}").write_text(f"{group.size} {world.local_rank} {total.item():g}")
    group.barrier()


if __name__ == "__main__":
    main()
