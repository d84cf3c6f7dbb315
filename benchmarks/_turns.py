"""Timing several ways of doing the same on several ranks, fairly: in turns, in changing order, medians over rounds.

What one way leaves behind (caches, busy threads, a peer that still works) falls on the next one. So the order changes
from round to round such that each way follows each of the others equally often. And what other processes do falls on
all of them, but not alike: who needs as many cores as there are suffers most. So it is measured and said.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks._results import busy_with_others
from phalanx.comm.stores import TCPStore

KB, MB = 1024, 1024 * 1024


class Timing(NamedTuple):
    """Median seconds, over rounds."""

    call: float
    """Of one call in the loop of a round."""
    first: float
    """Of the loop's first call, which finds what the way before it left in the caches."""


def rounds_for(nbytes: int, quick: bool) -> tuple[int, int]:
    """(rounds, calls in each round's loop): whole turns of two or four ways."""
    rounds = 4 if quick else 12
    calls = max(1, min(50, 32 * MB // max(nbytes, 64 * KB)))
    return rounds, calls


def orders(names: Sequence[str]) -> list[list[str]]:
    """As many orders as names, which must be even: in them each name directly follows each other one exactly once.

    >>> orders("abcd")
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]
    """
    count = len(names)
    assert count % 2 == 0, f"{count} names have no such orders"
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    return [[names[(shift + i) % count] for i in zigzag] for shift in range(count)]


def compare(
    ways: Mapping[str, Callable[[], object]], meet: Callable[[], object], rounds: int, calls: int
) -> dict[str, Timing]:
    """What each way takes on this rank; all ranks ``meet`` before each is timed."""
    times: dict[str, list[Timing]] = {name: [] for name in ways}
    turns = orders(list(ways))
    for number in range(rounds + 1):
        for name in turns[number % len(turns)]:
            meet()
            timing = _timed(ways[name], calls)
            if number:  # the first warms up
                times[name].append(timing)
    return {name: Timing(*map(statistics.median, zip(*times[name], strict=True))) for name in ways}


def _timed(call: Callable[[], object], calls: int) -> Timing:
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    for _ in range(calls - 1):
        call()
    return Timing((time.perf_counter() - start) / calls, first)


def on_ranks(size: int, run: Callable[..., None], *args: object) -> Iterator[Any]:
    """Run ``run(rank, store address, results, *args)`` in ``size`` processes; what is put into results, until None."""
    context = multiprocessing.get_context("spawn")
    store, results = TCPStore.serve(), context.Queue()
    processes = [context.Process(target=run, args=(rank, store.address, results, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    while (item := results.get(timeout=300)) is not None:
        yield item
    for process in processes:
        process.join(30)
    store.close()


def answers_of(target: Callable[..., None], size: int, *args: object, limit: float = 900.0) -> list[Any]:
    """Run ``target(rank, store address, *args, pipe)`` in ``size`` fresh processes; what each sends.

    ``EOFError`` if one ends without an answer, ``TimeoutError`` if there is none after ``limit`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    store = TCPStore.serve()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(target, rank, store.address, *args, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        until = time.monotonic() + limit
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                for process in processes:
                    process.kill()
                raise TimeoutError(f"rank {rank} of {size} has not answered after {limit:g} s")
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        store.close()


def _send(target: Callable[..., None], *args: object) -> None:
    target(*args)
    os._exit(0)  # peers may still be in their last collective: no teardown


@contextmanager
def disturbance_told() -> Iterator[None]:
    """Says in the end how busy other processes kept the machine during the block, whose own have ended by then."""
    with busy_with_others() as said:
        yield
    verdict = "quiet" if said["others"] < 0.1 else "NOT quiet: measure again"
    print(
        f"other processes used {said['others']:.2f} of {os.cpu_count()} cores meanwhile; {verdict}",
        flush=True,
    )


def amount(nbytes: int) -> str:
    """
    >>> amount(4 * MB), amount(256 * KB)
    ('4 MB', '256 KB')
    """
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
