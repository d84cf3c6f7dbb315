"""Our sharded tensors against torch's: sharding a module, gather, reshard, save and load.

Two ranks, by turns in one run. torch's side runs on gloo; ours once on the same gloo group, once on the group that
Phalanx makes by default (``auto``: shared memory between ranks of one machine). Ratios are our time over torch's: below
1 we are faster. Save and load are compared with ``torch.distributed.checkpoint`` on the same sharded state; both sync.

    python -m benchmarks.shard [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._results import record

RANKS = 2


def module_of(num_parameters: int, rows: int) -> nn.Module:
    return nn.ParameterDict({f"p{i}": nn.Parameter(torch.rand(rows, 64)) for i in range(num_parameters)})


def measure(function: Callable[[], Any]) -> float:
    """Seconds from a common start to the end of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    taken = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def worker(rank: int, folder: str, quick: bool, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    from phalanx.comm import Group, use_group
    from phalanx.comm.stores import FileStore

    groups = {
        "gloo": Group.wrap(dist.group.WORLD),
        "auto": Group.create(FileStore(f"{folder}/store-of-ours"), rank, RANKS),
    }
    found = {}
    for name, case in CASES.items():
        for backend, group in groups.items():
            if backend == "auto" or name not in ONCE:
                with use_group(group):
                    found[f"{name} ({backend})"] = case(rank, Path(folder), quick)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def by_turns(repeats: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[list[float], list[float]]:
    ours(), theirs()  # warm up
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def shard_module_case(rank: int, folder: Path, quick: bool) -> Any:
    from torch.distributed import _shard as torch_shard
    from torch.distributed._shard.sharding_plan import ShardingPlan as TorchPlan
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchSpec

    from phalanx import shard

    count = 20 if quick else 200
    names = [f"p{i}" for i in range(count)]

    def ours() -> float:
        module = module_of(count, 64)
        plan = shard.ShardingPlan({name: shard.ChunkShardingSpec(0, places()) for name in names})
        return measure(lambda: shard.shard_module(module, plan))

    def theirs() -> float:
        module = module_of(count, 64)
        plan = TorchPlan({name: TorchSpec(0, places()) for name in names})
        return measure(lambda: torch_shard.shard_module(module, plan))

    return by_turns(5, ours, theirs)


def places() -> list[Any]:
    return [f"rank:{rank}/cpu" for rank in range(RANKS)]


def pair(rows: int) -> tuple[Any, Any]:
    """The same tensor sharded by both."""
    from torch.distributed._shard import _shard_tensor as torch_shard_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchSpec

    from phalanx import shard

    whole = torch.rand(rows, 1024)
    ours = shard._shard_tensor(whole, shard.ChunkShardingSpec(0, places()))
    return ours, torch_shard_tensor(whole, TorchSpec(0, places()))


def gather_case(rank: int, folder: Path, quick: bool) -> Any:
    rows = 256 if quick else 16384
    ours, theirs = pair(rows)
    out = torch.empty(rows, 1024) if rank == 0 else None
    return by_turns(7, lambda: measure(lambda: ours.gather(0, out)), lambda: measure(lambda: theirs.gather(0, out)))


def reshard_case(rank: int, folder: Path, quick: bool) -> Any:
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchSpec

    from phalanx import shard

    ours, theirs = pair(256 if quick else 16384)

    def there_and_back(tensor: Any, kind: Any) -> None:
        tensor.reshard(kind(1, places()))
        tensor.reshard(kind(0, places()))

    return by_turns(
        7,
        lambda: measure(lambda: there_and_back(ours, shard.ChunkShardingSpec)),
        lambda: measure(lambda: there_and_back(theirs, TorchSpec)),
    )


def states(quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    pairs = {f"p{i}": pair(64 if quick else 1024) for i in range(4 if quick else 16)}
    return {name: a for name, (a, _) in pairs.items()}, {name: b for name, (_, b) in pairs.items()}


def save_case(rank: int, folder: Path, quick: bool) -> Any:
    import torch.distributed.checkpoint as dcp

    from phalanx import shard

    ours, theirs = states(quick)

    def clean(name: str) -> None:
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)

    def save_ours() -> float:
        clean("ours")
        return measure(lambda: shard.save(ours, folder / "ours"))

    def save_theirs() -> float:
        clean("theirs")
        return measure(lambda: dcp.save(theirs, checkpoint_id=folder / "theirs"))

    return by_turns(2 if quick else 15, save_ours, save_theirs)  # disks differ from one time to the next


def load_case(rank: int, folder: Path, quick: bool) -> Any:
    """Into the layout that was saved; uses the checkpoints that ``save_case`` left."""
    import torch.distributed.checkpoint as dcp

    from phalanx import shard

    ours, theirs = states(quick)
    return by_turns(
        2 if quick else 15,
        lambda: measure(lambda: shard.load(folder / "ours", ours)),
        lambda: measure(lambda: dcp.load(theirs, checkpoint_id=folder / "theirs")),
    )


CASES = {
    "shard_module": shard_module_case,
    "gather": gather_case,
    "reshard and back": reshard_case,
    "save": save_case,
    "load": load_case,
}
ONCE = ("save", "load")  # the group hardly matters to them
GOALS = {"shard_module": 0.5, "gather": 0.5, "reshard and back": 0.5, "save": 0.7, "load": 0.7}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    quick = parser.parse_args().quick
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=worker, args=(rank, folder, quick, results)) for rank in range(RANKS)]
        for process in workers:
            process.start()
        found = results.get(timeout=250)
        for process in workers:
            process.join()
    for name, (ours, theirs) in found.items():
        a, b = statistics.median(ours), statistics.median(theirs)
        record(f"shard/{name.replace(' (', '/').removesuffix(')')}", "ms", a * 1e3, b * 1e3)
        goal = GOALS[name.rpartition(" (")[0]]
        verdict = "met" if a / b <= goal else "missed"
        print(
            f"{name:24} ours {a * 1e3:8.1f} ms   torch {b * 1e3:8.1f} ms   ratio {a / b:.3g}   (goal {goal}: {verdict})"
        )


if __name__ == "__main__":
    main()
