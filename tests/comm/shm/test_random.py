"""Random collectives with checked results: ranks as threads with tiny slots, and a minute of four real processes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from phalanx.comm import Group
from phalanx.comm.stores import MemoryStore
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.comm.transports.shm._transport import ShmTransport
from processes import run_processes
from shm_random import run_random

TINY = {"slots": 4, "slot_bytes": 1024, "ring_bytes": 256}


def on_threads(size: int, main, *, progress: str = "thread", **layout: int) -> list:
    """``main(group)`` on ranks that are threads of this process; they share memory as processes do."""
    store, results, errors = MemoryStore(), [None] * size, []

    def run(rank: int) -> None:
        transport = ShmTransport.create(
            store, rank, size, timeout=60.0, progress=progress, layout=SegmentLayout(size=size, **layout)
        )
        group = Group(transport, ranks=range(size), make_subgroup=lambda ranks, key: transport)
        try:
            results[rank] = main(group)
        except BaseException as error:
            errors.append(error)
            group.abort()
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


@pytest.mark.fast
@pytest.mark.parametrize("progress", ["thread", "caller"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_everything_streams_through_tiny_slots(size: int, progress: str) -> None:
    def main(group: Group) -> int:
        return run_random(group, 17 * size, 3000, lambda number: number < 120)

    assert on_threads(size, main, progress=progress, **TINY) == [120] * size


def soak(worker, seconds: float, seed: int) -> int:
    group = worker.group(backend="auto", timeout=60.0)
    assert group.backend == "shm"
    ends = time.monotonic() + seconds

    def go_on(number: int) -> bool:
        if number % 50:
            return True
        vote = torch.tensor([time.monotonic() < ends])
        group.all_reduce(vote, "min")
        return bool(vote.item())

    count = run_random(group, seed, 400_000, go_on)
    group.close()
    return count


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [8.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_random_collectives_on_four_ranks(seconds: float) -> None:
    outcomes = run_processes(4, soak, seconds, 5, timeout=200.0)
    counts = {outcome.value for outcome in outcomes}
    assert len(counts) == 1
    assert counts.pop() >= 50


def test_eight_ranks_on_few_cores() -> None:
    outcomes = run_processes(8, soak, 5.0, 6)
    assert len({outcome.value for outcome in outcomes}) == 1
