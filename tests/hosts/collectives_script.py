"""What workers on hosts run to try collectives, each against the same computed alone; the transport is written down.

``collectives_script.py DIRECTORY``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import phalanx


def main() -> None:
    group = phalanx.init(timeout=120)
    rank, size = group.rank, group.size
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    total = parts[rank].clone()
    group.all_reduce(total)
    torch.testing.assert_close(total, torch.stack(parts).sum(0))
    gathered = torch.empty(size * 1000)
    group.all_gather_into_tensor(gathered, parts[rank])
    assert torch.equal(gathered, torch.cat(parts))
    sent = parts[size - 1].clone() if rank == size - 1 else torch.zeros(1000)
    group.broadcast(sent, size - 1)
    assert torch.equal(sent, parts[size - 1])
    share = torch.empty(1000)
    group.reduce_scatter_tensor(share, torch.cat([part * (rank + 1) for part in parts]))
    torch.testing.assert_close(share, parts[rank] * sum(range(1, size + 1)))
    group.barrier()
    (Path(sys.argv[1]) / f"rank{rank}").write_text(f"{size} {group.backend}")


if __name__ == "__main__":
    main()
