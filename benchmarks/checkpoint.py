"""Our checkpoints against torch.distributed.checkpoint (sync and async) and safetensors: time, and what a step waits.

Four ranks, one state cut by rows, local disk, all ways by turns in one run; medians. safetensors has no checkpoint of
several ranks: there every rank writes and reads a file of its own, synced, without digests or an index. The stall is
the time until the call that saves in the background returns; the save itself is waited for before the next turn.
Ratios are our time over theirs: below 1 we are faster.

    python -m benchmarks.checkpoint [--size MB] [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._results import busy_with_others, record
from benchmarks.shard import measure

RANKS, TENSORS, COLUMNS = 4, 16, 1024
GOALS = {"save": 0.6, "load": 0.6, "stall": 0.5}


class Ways:
    """The same state in the hands of each tool, on one rank."""

    def __init__(self, rank: int, folder: Path, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh as torch_mesh
        from torch.distributed.tensor import Shard as TorchShard
        from torch.distributed.tensor import distribute_tensor as torch_distribute

        from phalanx.comm import Group, use_group
        from phalanx.comm.stores import FileStore
        from phalanx.elastic import Saves
        from phalanx.elastic.checkpoint._saving import Saving
        from phalanx.events._writer import EventLog
        from phalanx.tensor import Shard, distribute_tensor, init_device_mesh

        self.rank, self.folder, self.rows = rank, folder, size * (1 << 20) // (4 * COLUMNS * TENSORS)
        self.group = Group.create(FileStore(str(folder / "store-of-ours")), rank, RANKS)
        self.context = use_group(self.group)
        self.context.__enter__()
        full = {f"p{i}": torch.rand(self.rows, COLUMNS) for i in range(TENSORS)}
        mesh, theirs = init_device_mesh("cpu", (RANKS,)), torch_mesh("cpu", (RANKS,))
        self.ours = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full.items()}
        self.theirs = {name: torch_distribute(value, theirs, [TorchShard(0)]) for name, value in full.items()}
        self.locals = {name: value.to_local() for name, value in self.theirs.items()}
        self.saving = Saving(Saves(directory=folder / "job", keep=1), EventLog(None))
        self.step = 0
        self.bare = dist.new_group()  # DCP's thread must not meet the barriers of the measurement

    def clean(self, name: str) -> Path:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        dist.barrier()
        return self.folder / name

    def save_ours(self) -> float:
        from phalanx import shard

        path = self.clean("ours")
        return measure(lambda: shard.save(self.ours, path))

    def save_dcp(self) -> float:
        import torch.distributed.checkpoint as dcp

        path = self.clean("dcp")
        return measure(lambda: dcp.save(self.theirs, checkpoint_id=path))

    def save_safetensors(self) -> float:
        from safetensors.torch import save_file

        def save() -> None:
            save_file(self.locals, self.folder / f"own-{self.rank}")
            with open(self.folder / f"own-{self.rank}", "rb") as file:
                os.fsync(file.fileno())

        return measure(save)

    def load_ours(self) -> float:
        from phalanx import shard

        return measure(lambda: shard.load(self.folder / "ours", self.ours))

    def load_dcp(self) -> float:
        import torch.distributed.checkpoint as dcp

        return measure(lambda: dcp.load(self.theirs, checkpoint_id=self.folder / "dcp"))

    def load_safetensors(self) -> float:
        from safetensors import safe_open

        def load() -> None:
            with safe_open(self.folder / f"own-{self.rank}", framework="pt") as file:
                for name, value in self.locals.items():
                    value.copy_(file.get_tensor(name))

        return measure(load)

    def stall_ours(self) -> float:
        """What a step of a sharded job waits: its worker's ranges are copied, threads do the rest."""
        from phalanx.elastic.checkpoint._tensor_files import TensorRange

        self.step += 1
        shape = (self.rows, COLUMNS)
        state = {"model": {name: torch.empty(shape, device="meta") for name in self.locals}}
        ranges = []
        for name, value in self.locals.items():
            begin = sum(self._share(rank) for rank in range(self.rank)) * COLUMNS
            ranges.append(TensorRange(f"model.{name}", shape, begin, begin + value.numel(), value.view(-1)))
        taken = measure(
            lambda: self.saving.submit_cells(
                self.step, state, ranges, number=self.rank, count=RANKS, key=str(self.step)
            )
        )
        self.saving.wait_idle()
        dist.barrier()
        return taken

    def _share(self, rank: int) -> int:
        return len(torch.empty(self.rows, 0).chunk(RANKS)[rank]) if rank < RANKS else 0

    def stall_dcp(self) -> float:
        import torch.distributed.checkpoint as dcp

        path, done = self.clean("async"), []
        taken = measure(lambda: done.append(dcp.async_save(self.theirs, checkpoint_id=path, process_group=self.bare)))
        done[0].result()
        dist.barrier()
        return taken


def worker(rank: int, folder: str, size: int, rounds: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ways = Ways(rank, Path(folder), size)
    found: dict[str, list[float]] = {}
    cases = [name for name in dir(Ways) if name.startswith(("save_", "load_", "stall_"))]
    for number in range(rounds + 1):
        for kind in ("save", "load", "stall"):
            turn = sorted(case for case in cases if case.startswith(kind))
            for case in turn if number % 2 else turn[::-1]:
                taken = getattr(ways, case)()
                if number:  # the first round warms up
                    found.setdefault(case, []).append(taken)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="MB of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--folder", help="on the disk to measure (default: the system's for temporary files)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, busy_with_others() as busy:
        arguments = (folder, options.size, options.rounds, results)
        workers = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in workers:
            process.start()
        found = results.get(timeout=1800)
        for process in workers:
            process.join()
    show({case: statistics.median(times) for case, times in found.items()}, options.size)
    print(f"others used {busy.get('others', 0.0)} cores")


def show(found: dict[str, float], size: int) -> None:
    for kind, goal in GOALS.items():
        ours, theirs = found[f"{kind}_ours"], found[f"{kind}_dcp"]
        bare = found.get(f"{kind}_safetensors")
        record(f"checkpoint/{kind}/{size}MB", "ms", ours * 1e3, theirs * 1e3)
        beside = ""
        if bare is not None:
            record(f"checkpoint/{kind}/{size}MB/safetensors", "ms", ours * 1e3, bare * 1e3)
            beside = f"   safetensors {bare * 1e3:8.1f} ms"
        verdict = "met" if ours / theirs <= goal else "missed"
        print(
            f"{kind:6} {size} MB  ours {ours * 1e3:8.1f} ms   DCP {theirs * 1e3:8.1f} ms{beside}   "
            f"ratio {ours / theirs:.3g}   (goal {goal}: {verdict})"
        )


if __name__ == "__main__":
    main()
