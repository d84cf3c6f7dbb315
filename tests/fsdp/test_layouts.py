"""Layouts as pure values, and gather and reduce on any of them: rows, cells with copies, random ranges."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from phalanx.comm import simulate
from phalanx.fsdp.layout._packing import copies, longest_part
from phalanx.fsdp.layout._unit_layout import (
    Range,
    UnitLayout,
    cells,
    flat_starts,
    intersect,
    joined,
    num_elements,
    rows,
)
from phalanx.fsdp.unit._gradient_sum import Destination, GradientSum, reduce_plan
from phalanx.fsdp.unit._unit_gather import CopyGather, part_length
from phalanx.fsdp.unit._unit_memory import HEADER, BufferPool, GatheredMemory, ShardStorage
from phalanx.fsdp.unit._unit_order import numbers_of

CPU = torch.device("cpu")


def random_layout(chance: random.Random, length: int, num_ranks: int) -> UnitLayout:
    """Any ranges: cut anywhere, owned by anybody, held by some others too."""
    cuts = sorted({0, length, *(chance.randrange(length + 1) for _ in range(chance.randrange(1, 9)))})
    owned: list[list[Range]] = [[] for _ in range(num_ranks)]
    held: list[list[Range]] = [[] for _ in range(num_ranks)]
    for piece in itertools.pairwise(cuts):
        owner = chance.randrange(num_ranks)
        owned[owner].append(piece)
        for rank in range(num_ranks):
            if rank == owner or chance.random() < 0.3:
                held[rank].append(piece)
    return UnitLayout(length, tuple(map(joined, held)), tuple(map(joined, owned)))


def layouts() -> list[tuple[str, UnitLayout, list[Range]]]:
    """(name, layout, extents of the parameters in it)."""
    chance = random.Random(5)
    found = []
    for number in range(12):
        num_ranks = chance.choice([1, 2, 3, 4])
        shapes = [
            tuple(chance.randrange(1, 7) for _ in range(chance.randrange(1, 4))) for _ in range(chance.randrange(1, 5))
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        starts = flat_starts(sizes)
        extents = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        dims = [chance.randrange(len(shape)) for shape in shapes]
        holders = [chance.sample(range(num_ranks), chance.randint(1, num_ranks)) for _ in range(chance.randrange(1, 6))]
        found.append((f"rows {number}", rows(shapes, num_ranks, dims), extents))
        found.append((f"cells {number}", cells(starts[-1], holders, num_ranks), extents))
        found.append((f"random {number}", random_layout(chance, starts[-1], num_ranks), extents))
    return found


LAYOUTS = layouts()


def held_by(layout: UnitLayout, rank: int, flat: torch.Tensor) -> torch.Tensor:
    """The naive reference: what a rank holds, element by element."""
    return torch.cat([flat[:0], *(flat[a:b] for a, b in layout.held[rank])])


@pytest.mark.parametrize(("name", "layout", "extents"), LAYOUTS, ids=[case[0] for case in LAYOUTS])
def test_gather_and_reduce_are_right_on_any_ranges(name, layout, extents):
    vector = torch.arange(layout.length, dtype=torch.float32) + 1
    for begin, end in extents:  # what lies between parameters belongs to nobody
        vector[begin:end] *= -1
    vector = vector.clamp(max=0)

    def main(group):
        pool = BufferPool()
        unit = torch.nn.Identity()  # anything
        number = numbers_of(group).add(unit)
        storage = ShardStorage(group, part_length(layout), torch.float32, CPU)
        held = held_by(layout, group.rank, vector)
        storage.buffer[HEADER : HEADER + held.numel()] = held
        for dtype in (torch.float32, torch.bfloat16):
            gather = CopyGather(group, layout, GatheredMemory(layout.length, dtype, CPU), pool)
            for _ in range(2):
                gather.start(storage, number, async_op=False)
                gather.finish()
                for begin, end in extents:
                    assert torch.equal(gather.flat[begin:end], vector[begin:end].to(dtype))
                gather.release()
        chosen = extents[:: 2 if len(extents) > 2 else 1]
        reduction = GradientSum(number, reduce_plan(layout, group.rank, chosen), torch.float32, CPU, pool)
        for index, (begin, end) in enumerate(chosen):
            if index != 1:  # one has no gradient anywhere
                reduction.add(group, index, vector[begin:end] * (group.rank + 1))
                reduction.add(group, index, vector[begin:end])
        to = Destination(shard=group, replicate=None, factor=2.0)
        reduction.start(to, async_op=True)
        pieces = reduction.finish()
        total = sum(range(1, group.size + 1)) + group.size
        for index, (begin, end) in enumerate(chosen):
            if index == 1:
                assert pieces[index] is None
            else:
                own = torch.cat(
                    [vector[:0], *(vector[a:b] for a, b in intersect(layout.held[group.rank], [(begin, end)]))]
                )
                assert torch.equal(pieces[index], own * total / 2)

    simulate(layout.num_ranks).run(main)


@pytest.mark.parametrize("seed", range(20))
def test_copies_move_every_element_once(seed):
    chance = random.Random(seed)
    layout = random_layout(chance, 300, 3)
    begin, end = sorted((chance.randrange(301), chance.randrange(301)))
    offset, part = 5, 5 + longest_part(layout.owned)
    written = {}
    for move in copies(layout.owned, part, begin, end, offset):
        for run in range(move.times):
            for i in range(move.count):
                flat = begin + move.flat + run * move.flat_stride + i
                assert flat not in written
                written[flat] = move.packed + run * move.packed_stride + i
    expected = {}
    for rank, ranges in enumerate(layout.owned):
        at = rank * part + offset
        for a, b in ranges:
            expected.update({e: at + e - a for e in range(max(a, begin), min(b, end))})
            at += b - a
    assert written == expected


def test_even_rows_are_one_copy_for_each_parameter():
    layout = rows([(8, 5), (4,), (16, 2, 3)], 4)
    part = longest_part(layout.owned)
    assert len(copies(layout.owned, part, 0, layout.length)) == 3


def test_rows_are_what_chunks_are():
    for shape, dim in (((5, 3), 0), ((5, 3), 1), ((2, 4, 3), 1), ((1,), 0)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        layout = rows([shape], 4, [dim])
        for rank in range(4):
            chunks = whole.chunk(4, dim)
            expected = chunks[rank].flatten() if rank < len(chunks) else whole.flatten()[:0]
            assert torch.equal(held_by(layout, rank, whole.flatten()), expected)


def test_cells_are_aligned_and_do_not_depend_on_the_holders():
    one = cells(1000, [[0]] * 5)
    other = cells(1000, [[i % 3, (i + 1) % 3] for i in range(5)])
    assert one.num_held == (1000,)
    assert all(a % 64 == 0 for ranges in other.owned for a, _ in ranges)
    assert sum(other.num_owned) == 1000
    assert sum(other.num_held) == 2000


def test_layouts_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="two ranks own element 3"):
        UnitLayout(8, (((0, 4),), ((3, 8),)), (((0, 4),), ((3, 8),)))
    with pytest.raises(ValueError, match="rank 0 owns"):
        UnitLayout(8, (((0, 4),),), (((0, 8),),))
    with pytest.raises(ValueError, match="ascending"):
        UnitLayout(8, (((4, 8), (0, 4)),), (((0, 4),),))
    with pytest.raises(ValueError, match="distinct ranks"):
        cells(100, [[0, 0]])
    assert num_elements([(0, 3), (5, 6)]) == 4
