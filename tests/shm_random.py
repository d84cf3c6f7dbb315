"""Random collectives with checked results: every rank draws the same plan and knows what every rank contributes.

Contributions are small whole numbers, so sums are exact in every dtype used; floats of full precision are reduced too
and compared, bit for bit, with the fixed tree over ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.comm import Group, ReduceOp
from phalanx.comm.transports._tree_reduce import tree_reduce

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
OPS = ["sum", "max", "min", "sum", "sum"]


class Draw:
    """The plan: the same on all ranks that start from the same seed."""

    def __init__(self, group: Group, seed: int, max_elements: int) -> None:
        self.group = group
        self.random = random.Random(seed)
        self.max_elements = max_elements

    def count(self) -> int:
        """Mostly small, sometimes empty, now and then large."""
        top = self.random.choice([1, 10, 1000, 5000, self.max_elements])
        return self.random.randint(0, top)

    def data(self, rank: int, number: int, count: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(number * 64 + rank)
        if dtype in (torch.float32, torch.float64):
            return torch.randn(count, generator=generator, dtype=dtype)
        return torch.randint(0, 7, (count,), generator=generator).to(dtype)

    def place(self, value: Tensor, shared: bool) -> Tensor:
        if not shared or not value.numel():
            return value
        tensor = self.group.shared_empty(value.shape, value.dtype)
        return tensor.copy_(value)


Check = Callable[[], None]


def _same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(actual, expected), f"{what}: {actual} instead of {expected}"


def issue(draw: Draw, number: int) -> tuple[list, Check]:
    """Start one random collective; the works to wait for, and the check to make then."""
    group, rng = draw.group, draw.random
    size, me = group.size, group.rank
    kind = rng.choice(KINDS)
    dtype, op, root = rng.choice(DTYPES), rng.choice(OPS), rng.randrange(size)
    if dtype.is_complex:  # they have no order
        op = "sum"
    background = rng.random() < 0.3
    shared_by = [rng.random() < 0.5] * size if rng.random() < 0.8 else [rng.random() < 0.5 for _ in range(size)]
    count = draw.count()
    counts = [draw.count() for _ in range(size)] if rng.random() < 0.3 else [count] * size
    what = f"#{number} {kind} {dtype} {op} root {root} counts {counts} shared {shared_by} async {background}"

    def mine(total: int, salt: int = 0) -> Tensor:
        return draw.place(draw.data(me, number + salt, total, dtype), shared_by[me])

    def all_of(total: int) -> list[Tensor]:
        return [draw.data(r, number, total, dtype) for r in range(size)]

    def reduced(parts: list[Tensor]) -> Tensor:
        return tree_reduce(parts, ReduceOp(op)) if parts[0].numel() else parts[0]

    start = {"async_op": background}
    if kind == "all_reduce":
        tensor = mine(count)
        return [group.all_reduce(tensor, op, **start)], lambda: _same(tensor, reduced(all_of(count)), what)
    if kind == "reduce":
        tensor = mine(count)
        work = group.reduce(tensor, root, op, **start)
        return [work], lambda: _same(
            tensor, reduced(all_of(count)) if me == root else draw.data(me, number, count, dtype), what
        )
    if kind == "broadcast":
        tensor = mine(count)
        return [group.broadcast(tensor, root, **start)], lambda: _same(tensor, all_of(count)[root], what)
    if kind == "all_gather":
        outputs = [torch.empty(c, dtype=dtype) for c in counts]
        work = group.all_gather(outputs, mine(counts[me]), **start)
        return [work], lambda: [_same(o, draw.data(r, number, counts[r], dtype), what) for r, o in enumerate(outputs)]
    if kind == "reduce_scatter":
        whole = mine(sum(counts))
        output = torch.empty(counts[me], dtype=dtype)
        work = group.reduce_scatter(output, list(whole.split(counts)), op, **start)
        return [work], lambda: _same(output, reduced([p.split(counts)[me] for p in all_of(sum(counts))]), what)
    if kind == "all_to_all":
        table = [[draw.count() for _ in range(size)] for _ in range(size)]
        whole = mine(sum(table[me]))
        outputs = [torch.empty(table[r][me], dtype=dtype) for r in range(size)]
        work = group.all_to_all(outputs, list(whole.split(table[me])), **start)
        return [work], lambda: [
            _same(o, draw.data(r, number, sum(table[r]), dtype).split(table[r])[me], what)
            for r, o in enumerate(outputs)
        ]
    if kind == "gather":
        outputs = [torch.empty(c, dtype=dtype) for c in counts] if me == root else None
        work = group.gather(mine(counts[me]), outputs, root, **start)
        return [work], lambda: [
            _same(o, draw.data(r, number, counts[r], dtype), what) for r, o in enumerate(outputs or ())
        ]
    if kind == "scatter":
        inputs = list(mine(sum(counts)).split(counts)) if me == root else None
        output = torch.empty(counts[me], dtype=dtype)
        work = group.scatter(output, inputs, root, **start)
        whole_count = sum(counts)
        return [work], lambda: _same(output, draw.data(root, number, whole_count, dtype).split(counts)[me], what)
    if kind == "exchange" and size > 1:  # with the neighbours, both directions at once
        right, left = (me + 1) % size, (me - 1) % size
        output = torch.empty(count, dtype=dtype)
        works = [
            group.send(mine(count), right, tag=number, async_op=True),
            group.recv(output, left, tag=number, async_op=True),
        ]
        return works, lambda: _same(output, draw.data(left, number, count, dtype), what)
    return [group.barrier(**start)], lambda: None


KINDS = [
    "all_reduce",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "exchange",
    "barrier",
]


def run_random(group: Group, seed: int, max_elements: int, go_on: Callable[[int], bool]) -> int:
    """Collectives until ``go_on(how many so far)`` says no (alike on all ranks); up to five are under way at once."""
    draw = Draw(group, seed, max_elements)
    number, open_checks = 0, []
    while go_on(number):
        number += 1
        open_checks.append(issue(draw, number))
        while len(open_checks) > draw.random.randrange(6):
            works, check = open_checks.pop(draw.random.randrange(len(open_checks)))
            for work in works:
                work.wait()
            check()
    for works, check in open_checks:
        for work in works:
            work.wait()
        check()
    return number
