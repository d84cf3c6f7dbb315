"""Streaming data: ours against mosaicml-streaming and litdata, where they are installed, on the same samples.

For each: two ranks go through 60 or 61% of an epoch, three resume from the saved state and go through the rest. How
many samples were lost or seen twice, how long the first batch after the resume took, how much memory until then. Then
one process goes through an epoch: how often it opened a shard, and what a sample cost. Everybody reads local files,
shuffles, and has no loader processes; all take turns in one run. What is not installed is left out, and said.

    python -m benchmarks.streaming [--samples 20000] [--shards 100]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks._results import record
from benchmarks.sampler import forget_peak, peak_memory
from phalanx.data import ElasticDistributedSampler, ShardedDataset, ShardOrder
from phalanx.data.sources import MDSSource, TarSource

GLOBAL_BATCH = 96
PAYLOAD = 2000
SHARES = (0.6, 0.613)
"""Where a run is resumed, in turn: after steps that divide evenly by two and three ranks, and elsewhere."""
SEED = 7
Batches = Iterator[list[int]]
#: (steps, samples) that this rank has done: the state to resume from.
StateOf = Callable[[int, int], Any]


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAYLOAD)


# -- the data -------------------------------------------------------------------------------------------------


def write_tar(folder: Path, samples: int, shards: int) -> None:
    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard * samples // shards, (shard + 1) * samples // shards):
                for field, content in (("id", str(number).encode()), ("bin", payload(number))):
                    info = tarfile.TarInfo(f"{number:09d}.{field}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


def write_mds(folder: Path, samples: int, shards: int) -> None:
    mosaic = importlib.import_module("streaming")
    limit = (PAYLOAD + 20) * samples // shards
    with mosaic.MDSWriter(out=str(folder), columns={"id": "int", "bin": "bytes"}, size_limit=limit) as out:
        for number in range(samples):
            out.write({"id": number, "bin": payload(number)})


def write_litdata(folder: Path, samples: int, shards: int) -> None:
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_size=samples // shards)
    for number in range(samples):
        writer[number] = {"id": number, "bin": payload(number)}
    writer.done()
    writer.merge()


# -- who reads it: each gives batches of ids of this rank, and a function for its state after some steps ---------


def ours(dataset: ShardedDataset, state: Any, rank: int, world: int) -> tuple[Batches, StateOf]:
    order = ShardOrder(dataset, lanes=6, run=1)
    sampler = ElasticDistributedSampler(dataset, world, rank, order=order, seed=SEED, tail="uneven")
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, collate_fn=list)
    batches = ([int(sample["id"]) for sample in batch] for batch in loader)
    return batches, lambda steps, consumed: sampler.state_dict(consumed=consumed)


def ours_tar(folder: Path, state: Any, rank: int, world: int) -> tuple[Batches, StateOf]:
    return ours(ShardedDataset(TarSource(sorted(folder.glob("*.tar")))), state, rank, world)


def ours_mds(folder: Path, state: Any, rank: int, world: int) -> tuple[Batches, StateOf]:
    return ours(ShardedDataset(MDSSource(folder)), state, rank, world)


def mosaic(folder: Path, state: Any, rank: int, world: int) -> tuple[Batches, StateOf]:
    streaming = importlib.import_module("streaming")
    batch = GLOBAL_BATCH // world
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=batch)
    if state is not None:
        dataset.load_state_dict(state)
    loader = DataLoader(dataset, batch_size=batch, collate_fn=list)
    batches = ([int(sample["id"]) for sample in found] for found in loader)
    return batches, lambda steps, consumed: dataset.state_dict(steps * GLOBAL_BATCH, True)


def litdata(folder: Path, state: Any, rank: int, world: int) -> tuple[Batches, StateOf]:
    package = importlib.import_module("litdata")
    dataset = package.StreamingDataset(str(folder), shuffle=True, seed=SEED, drop_last=False)
    loader = package.StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH // world, collate_fn=list)
    if state is not None:
        loader.load_state_dict(state)
    return ([int(sample["id"]) for sample in found] for found in loader), lambda steps, consumed: loader.state_dict()


#: name: the package that it needs, who writes what it reads, who reads.
KINDS = {
    "ours_tar": (None, write_tar, ours_tar),
    "ours_mds": ("streaming", write_mds, ours_mds),
    "mosaic": ("streaming", write_mds, mosaic),
    "litdata": ("litdata", write_litdata, litdata),
}


# -- measuring ------------------------------------------------------------------------------------------------


def count_opens(folder: Path) -> list[int]:
    """Count the shards under ``folder`` that this process opens from now on, in the list's one element."""
    count = [0]

    def watch(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(folder)):
            count[0] += arguments[0].endswith((".tar", ".mds", ".bin"))

    sys.addaudithook(watch)
    return count


def one_rank(kind: str, folder: Path, job: dict[str, Any], rank: int, pipe: Any) -> None:
    """Go through batches as one rank; send what was seen and measured, or the error."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # theirs say much that is not measured
    world = job["world"]
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    try:
        dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
        opened = count_opens(folder)
        forget_peak()
        before, begin = peak_memory(), time.perf_counter()
        batches, state_of = KINDS[kind][2](folder, job["state"], rank, world)
        seen = list(next(batches, []))
        first, memory = time.perf_counter() - begin, peak_memory() - before
        steps = 1
        while steps != job["steps"] and (batch := next(batches, None)) is not None:
            seen += batch
            steps += 1
        total = time.perf_counter() - begin
        answer = {"seen": seen, "first": first, "memory": memory, "total": total, "state": state_of(steps, len(seen))}
        answer["opens"] = opened[0]
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    pipe.send(answer)
    os._exit(0)


def ranks(kind: str, folder: Path, world: int, state: Any = None, steps: int = -1) -> list[dict[str, Any]]:
    """What each of ``world`` processes answered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"world": world, "state": state, "steps": steps, "port": port}
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=one_rank, args=(kind, folder, job, rank, sender)))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    answers = [pipe.recv() if pipe.poll(300) else {"error": "no answer in 300 s"} for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    return answers


def resize(kind: str, folder: Path, samples: int, share: float) -> dict[str, Any]:
    """Two ranks to some share of the epoch, three for the rest."""
    before = ranks(kind, folder, 2, steps=int(share * samples) // GLOBAL_BATCH)
    failed = [answer["error"] for answer in before if "error" in answer]
    if failed:
        return {"error": failed[0]}
    after = ranks(kind, folder, 3, json.loads(json.dumps(before[0]["state"])))
    failed = [answer["error"] for answer in after if "error" in answer]
    if failed:
        return {"error": failed[0]}
    seen = [number for answer in [*before, *after] for number in answer["seen"]]
    return {
        "lost": samples - len(set(seen)),
        "repeated": len(seen) - len(set(seen)),
        "first": max(answer["first"] for answer in after),
        "memory": max(answer["memory"] for answer in after),
    }


def epoch(kind: str, folder: Path) -> dict[str, Any]:
    """One process through an epoch: opened shards, and seconds for a sample."""
    (answer,) = ranks(kind, folder, 1)
    if "error" in answer:
        return answer
    return {"opens": answer["opens"], "sample": answer["total"] / len(answer["seen"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = [kind for kind, (package, *_) in KINDS.items() if package is None or importlib.util.find_spec(package)]
    for kind in KINDS.keys() - {*known}:
        print(f"{kind}: not measured, {KINDS[kind][0]} is not installed")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in known:
            folder = Path(scratch) / KINDS[kind][1].__name__
            if not folder.exists():
                KINDS[kind][1](folder, options.samples, options.shards)
            epoch(kind, folder)  # warms what the kernel keeps, and makes indexes that are made once
        rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in known}
        for number in range(options.rounds):
            for kind in known:
                folder = Path(scratch) / KINDS[kind][1].__name__
                rounds[kind].append(
                    {**epoch(kind, folder), **resize(kind, folder, options.samples, SHARES[number % 2])}
                )
    for kind, each in rounds.items():
        failed = [one["error"] for one in each if "error" in one]
        worst = {name: max(one[name] for one in each) for name in ("lost", "repeated")} if not failed else {}
        names = ("first", "memory", "opens", "sample")
        found[kind] = {} if failed else {n: statistics.median(one[n] for one in each) for n in names} | worst
        print(f"{kind:>10}: {failed[0] if failed else line(found[kind])}")
    tell(found)


def line(row: dict[str, float]) -> str:
    return (
        f"lost {row['lost']:.0f}, twice {row['repeated']:.0f}; first batch {row['first'] * 1e3:.1f} ms, "
        f"{row['memory']:.1f} MB; {row['opens']:.0f} opens, {row['sample'] * 1e6:.1f} us a sample"
    )


def tell(found: dict[str, dict[str, Any]]) -> None:
    """Record each of theirs beside ours on the same format, or on tar files."""
    units = {"lost": ("samples", 1), "repeated": ("samples", 1), "first": ("ms", 1e3), "memory": ("MB", 1),
             "opens": ("files", 1), "sample": ("us", 1e6)}  # fmt: skip
    for kind, beside in (("ours_tar", None), ("mosaic", "ours_mds"), ("litdata", "ours_tar")):
        if not found.get(kind):
            continue
        for what, (unit, scale) in units.items():
            theirs = None if beside is None else found[kind][what] * scale
            mine = found[beside or kind].get(what)
            if mine is not None:
                record(f"streaming/{what}/{kind}", unit, mine * scale, theirs)


if __name__ == "__main__":
    main()
