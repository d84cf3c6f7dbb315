"""A plain torch.distributed worker, as torchrun's users write it: rounds of all-reduce, with faults on demand.

Usage: summing.py DIRECTORY ROUNDS [rank:round:what]; faults happen in the first generation only. Appends one line
"generation restart rank size pid" per start to DIRECTORY/starts and one "rank" per end to DIRECTORY/ends.
A file DIRECTORY/end ends all after the same round.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def note(name: str, *words: object) -> None:
    with open(os.path.join(sys.argv[1], name), "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def fault(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("told to fail")
    elif what == "exit1":
        sys.exit(1)
    elif what == "exit0":
        os._exit(0)
    elif what == "segv":
        ctypes.string_at(0)
    elif what == "wait":
        time.sleep(600)


def main() -> None:
    rank, generation = int(os.environ["RANK"]), int(os.environ["PHALANX_GENERATION"])
    note(
        "starts",
        generation,
        os.environ["TORCHELASTIC_RESTART_COUNT"],
        rank,
        os.environ["WORLD_SIZE"],
        os.getpid(),
    )
    faults = {tuple(map(int, f.split(":")[:2])): f.split(":")[2] for f in sys.argv[3:]} if generation == 0 else {}
    dist.init_process_group("gloo")
    for turn in range(int(sys.argv[2])):
        fault(faults.get((rank, turn), ""))
        x = torch.tensor([float(rank + turn)])
        dist.all_reduce(x)
        size = dist.get_world_size()
        assert x.item() == size * turn + size * (size - 1) / 2, (x, rank, turn)
        wish = torch.tensor([float(os.path.exists(os.path.join(sys.argv[1], "end")))])
        dist.all_reduce(wish)
        if wish.item():
            break
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    dist.barrier()
    dist.destroy_process_group()
    note("ends", rank)


main()
