"""Two workers sum a tensor: the smallest program that uses Phalanx.

Run it with ``python examples/all_reduce.py``: it starts both workers itself.
"""

from __future__ import annotations

import multiprocessing

import torch

from phalanx.comm import Group
from phalanx.comm.stores import TCPStore, connect


def worker(rank: int, store_url: str) -> None:
    with Group.create(connect(store_url), rank, world_size=2, timeout=60) as group:
        tensor = torch.arange(4.0) + 10 * rank
        print(f"rank {rank} of {group.size} ({group.backend}) has {tensor.tolist()}", flush=True)
        group.all_reduce(tensor)
        print(f"rank {rank} of {group.size} got the sum {tensor.tolist()}", flush=True)
        assert tensor.tolist() == [10.0, 12.0, 14.0, 16.0]
        group.barrier()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    store = TCPStore.serve()
    workers = [context.Process(target=worker, args=(rank, store.address)) for rank in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    codes = [process.exitcode for process in workers]
    store.close()
    if codes != [0, 0]:
        raise SystemExit(f"the workers ended with exit codes {codes}")
    print("A real all-reduce between two worker processes.")


if __name__ == "__main__":
    main()
