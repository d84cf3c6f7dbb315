"""Assigns parameters to buckets: pure functions, no communication, no memory.

A bucket is one flat tensor that is reduced at once. Buckets are launched in one fixed order that all ranks share,
so the assignment must be a function of values that all ranks share too: the parameters, the order in which their
gradients are expected (agreed beforehand) and the size caps.

Invariants: every index appears in exactly one bucket; a bucket has one dtype and one device; sparse parameters are
in none (they travel on their own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

MIB = 1024 * 1024
FIRST_CAP = 1 * MIB
DEFAULT_CAP = 25 * MIB
CANDIDATE_CAPS = tuple(MIB * size for size in (1, 2, 4, 8, 16, 25, 50, 100))


@dataclass(frozen=True)
class ParamInfo:
    """What the layout must know of a parameter."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Caps:
    """Size limits in bytes: bucket i closes once it holds ``sizes[i]`` (the last one repeats).

    ``chosen_by_user`` says that measured times must not replace them.
    """

    sizes: tuple[int, ...]
    chosen_by_user: bool

    @classmethod
    def from_options(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> Caps:
        if cap_mb_list:
            return cls(tuple(int(mb * MIB) for mb in cap_mb_list), True)
        if cap_mb is not None:
            return cls((int(cap_mb * MIB),), True)
        return cls((FIRST_CAP, DEFAULT_CAP), False)

    def at(self, index: int) -> int:
        return self.sizes[min(index, len(self.sizes) - 1)]


def assign_buckets(infos: Sequence[ParamInfo], order: Sequence[int], caps: Caps) -> list[list[int]]:
    """Cut ``order`` (indices in the order their gradients are expected) into buckets, in launch order.

    Walks once. Each (dtype, device) pair has one open bucket; it closes when it reaches its cap. Buckets are
    launched by the position of their last member, since that is when they become ready.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed_count: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for index in order:
        info = infos[index]
        if info.sparse:
            continue
        key = (info.dtype, info.device)
        open_buckets.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + info.nbytes
        if open_bytes[key] >= caps.at(closed_count.get(key, 0)):
            closed.append(open_buckets.pop(key))
            closed_count[key] = closed_count.get(key, 0) + 1
            open_bytes[key] = 0
    closed.extend(open_buckets.values())
    position = {index: place for place, index in enumerate(order)}
    closed.sort(key=lambda bucket: position[bucket[-1]])
    return closed


def complete_order(observed: Sequence[int], count: int) -> list[int]:
    """Return the observed order of arrival, with what never arrived put last (latest registered first)."""
    seen = set(observed)
    return [*dict.fromkeys(observed), *(index for index in reversed(range(count)) if index not in seen)]


@dataclass(frozen=True)
class CommCost:
    """A collective of n bytes is taken to last ``latency + n / bandwidth`` seconds."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


def finish_time(ready: Sequence[float], nbytes: Sequence[int], buckets: Sequence[int], cost: CommCost) -> float:
    """Return when the last reduction ends, if collectives run one after the other, each no earlier than its bucket is
    ready.

    ``ready`` and ``nbytes`` are per parameter in launch order; ``buckets`` are the numbers of parameters per bucket.
    """
    clock = 0.0
    for end, count in zip(accumulate(buckets), buckets, strict=True):
        clock = max(clock, max(ready[end - count : end])) + cost.seconds(sum(nbytes[end - count : end]))
    return clock


def choose_caps(ready: Sequence[float], nbytes: Sequence[int], cost: CommCost, *, spare_cores: bool = True) -> Caps:
    """Return the caps with the earliest finish for the measured ready times; ties go to the larger (fewer collectives).

    Without spare cores communication takes its time from backward whenever it runs: an early start gains nothing and
    many small collectives cost (a 25M-parameter transformer on gloo: 1.06 of torch's time at 1 MiB, 1.00 at 25 MiB), so
    only large caps are considered, and no small first bucket.
    """

    def caps(cap: int) -> Caps:
        return Caps((min(FIRST_CAP, cap), cap) if spare_cores else (cap,), False)

    def cut(cap: int) -> list[int]:
        counts: list[int] = []
        size, count = 0, 0
        limits = caps(cap)
        for amount in nbytes:
            size, count = size + amount, count + 1
            if size >= limits.at(len(counts)):
                counts.append(count)
                size, count = 0, 0
        return [*counts, count] if count else counts

    candidates = [cap for cap in CANDIDATE_CAPS if spare_cores or cap >= DEFAULT_CAP]
    return caps(min(reversed(candidates), key=lambda cap: finish_time(ready, nbytes, cut(cap), cost)))
