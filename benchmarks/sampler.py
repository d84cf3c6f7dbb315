"""Our elastic sampler against torch's: time and memory to the first index, and to iterate an epoch.

Each measurement runs in a forked child of its own, ours and torch's by turns in one run, so that both
meet the same machine. Ratios are torch's time over ours: above 1 we are faster. Per index, iteration
counts everything from ``iter()`` to the end. Ours alone at 10^9 and 10^12: first index, and seek.

    python -m benchmarks.sampler [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.utils.data import ElasticDistributedSampler as TorchSampler

from benchmarks._results import record
from phalanx.data import ElasticDistributedSampler


class Numbers:
    """A dataset that is nothing but its length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def peak_memory() -> float:
    """The highest resident memory of this process since ``forget_peak``, in MB (Linux; else nan)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")


def first_and_all(kind: Callable[..., Any], length: int, replicas: int) -> dict[str, float]:
    """Seconds to the first index and to the end of an epoch, and the memory each took."""
    list(kind(Numbers(5000), num_replicas=replicas, rank=0))  # warm up what is made once per process
    forget_peak()
    before = peak_memory()
    begin = time.perf_counter()
    indices = iter(kind(Numbers(length), num_replicas=replicas, rank=0))
    next(indices)
    first = time.perf_counter() - begin
    first_memory = peak_memory() - before
    taken = 1 + sum(1 for _ in indices)
    total = time.perf_counter() - begin
    assert taken == -(-length // replicas), "an epoch must be complete"
    return {
        "first": first,
        "first_memory": first_memory,
        "per_index": total / taken,
        "memory": peak_memory() - before,
    }


def ours_alone(length: int) -> dict[str, float]:
    """Seconds to the first index, and from a saved state in the middle to its first index."""
    list(ElasticDistributedSampler(Numbers(5000), 1, 0))
    forget_peak()
    before = peak_memory()
    begin = time.perf_counter()
    sampler = ElasticDistributedSampler(Numbers(length), num_replicas=8, rank=3)
    next(iter(sampler))
    first = time.perf_counter() - begin
    state = {**sampler.state_dict(), "position": length // 2}
    begin = time.perf_counter()
    sampler.load_state_dict(state)
    next(iter(sampler))
    return {"first": first, "seek": time.perf_counter() - begin, "memory": peak_memory() - before}


def in_child(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run in a forked child, so that no measurement sees the memory of another."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(function(*arguments)))
    child.start()
    sender.close()
    result: dict[str, float] = receiver.recv()
    child.join()
    return result


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def compare(length: int, replicas: int, repeats: int) -> None:
    kinds = {"ours": ElasticDistributedSampler, "torch": TorchSampler}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, kind in kinds.items():
            results[name].append(in_child(first_and_all, kind, length, replicas))
    middle = {name: medians(each) for name, each in results.items()}
    for name, value in middle.items():
        print(
            f"{length:>14,} {replicas:>8} {name:>6} {value['first'] * 1e3:>12.3f} {value['first_memory']:>10.1f} "
            f"{value['per_index'] * 1e9:>12.1f} {value['memory']:>10.1f}"
        )
    ours, theirs = middle["ours"], middle["torch"]
    for what, unit, scale in (("first", "ms", 1e3), ("per_index", "ns", 1e9), ("memory", "MB", 1)):
        record(f"sampler/{what}/{length:.0e}/{replicas}", unit, ours[what] * scale, theirs[what] * scale)
    print(
        f"{'':>14} {'':>8} {'ratio':>6} {theirs['first'] / ours['first']:>11.0f}x {'':>10} "
        f"{theirs['per_index'] / ours['per_index']:>11.2f}x {'':>10}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10^6 and 10^7 only, once")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(
        f"{'samples':>14} {'replicas':>8} {'':>6} {'first ms':>12} {'first MB':>10} {'ns/index':>12} {'epoch MB':>10}"
    )
    plan = [(10**6, 1, 5), (10**6, 8, 5), (10**7, 1, 3), (10**7, 8, 3), (5 * 10**7, 1, 1), (5 * 10**7, 8, 1)]
    for length, replicas, repeats in plan[:4] if quick else plan:
        compare(length, replicas, 1 if quick else repeats)
    print(f"\n{'ours alone':>14} {'first ms':>12} {'seek ms':>10} {'MB':>8}")
    for length in (10**9, 10**12):
        value = medians([in_child(ours_alone, length) for _ in range(1 if quick else 9)])
        for what, unit, scale in (("first", "ms", 1e3), ("seek", "ms", 1e3), ("memory", "MB", 1)):
            record(f"sampler/{what}/{length:.0e}/8", unit, value[what] * scale)
        print(f"{length:>14.0e} {value['first'] * 1e3:>12.3f} {value['seek'] * 1e3:>10.3f} {value['memory']:>8.2f}")


if __name__ == "__main__":
    main()
