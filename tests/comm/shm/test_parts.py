"""The pure parts of the same-host transport: layout, tree, call records, shares, allocations."""

from __future__ import annotations

import gc
import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import ReduceOp
from phalanx.comm.failure._liveness import Identity
from phalanx.comm.stores import MemoryStore
from phalanx.comm.transports._tree_reduce import tree_reduce
from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm import _shared_tensors
from phalanx.comm.transports.shm._calls import KINDS, describe, record
from phalanx.comm.transports.shm._collectives import shares
from phalanx.comm.transports.shm._engine import nap_length
from phalanx.comm.transports.shm._fold import Fold
from phalanx.comm.transports.shm._regions import span
from phalanx.comm.transports.shm._segment_join import obstacle
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.comm.transports.shm._transport import ShmTransport
from phalanx.errors import PeerLost

pytestmark = pytest.mark.fast


@given(size=st.integers(1, 16), slots=st.integers(4, 8), slot_kb=st.integers(1, 64))
def test_no_two_things_overlap_in_the_segment(size: int, slots: int, slot_kb: int) -> None:
    layout = SegmentLayout(size=size, slots=slots, slot_bytes=slot_kb * 1024, ring_bytes=4096)
    spans = [(0, L.HEADER_WORDS * 8)]
    for rank in range(size):
        block = layout.block(rank) * 8
        spans += [(block, layout.regions_word * 8), (block + layout.regions_word * 8, L.REGIONS * 8)]
        spans += [(layout.slot(rank, slot), layout.slot_bytes) for slot in range(slots)]
        for dst in range(size):
            head, tail, ring = layout.channel(rank, dst)
            spans += [(head * 8, L.LINE * 8), (tail * 8, L.LINE * 8), (ring, layout.ring_bytes)]
            assert layout.writer(head) == rank
            assert layout.writer(tail) == dst
        assert layout.writer(layout.block(rank) + L.READY) == rank
        assert layout.writer(layout.block(rank) + L.TAKEN) == rank
    spans.sort()
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(spans))
    assert sum(spans[-1]) <= layout.total_bytes
    assert layout.sizes_word + slots * size <= layout.regions_word


def test_eight_ranks_need_less_than_a_containers_shared_memory() -> None:
    assert SegmentLayout(size=8).total_bytes < 64 * 1024 * 1024


@given(
    count=st.integers(1, 9),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_all_forms_of_the_tree_have_the_bits_of_the_reference(
    count: int, op: ReduceOp, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(37, generator=generator).to(dtype) for _ in range(count)]
    expected = tree_reduce(values, op)
    kept = [value.clone() for value in values]
    out = torch.empty(37, dtype=dtype)
    fold = Fold(op, dtype, count)
    fold.into(out, values)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(values, kept, strict=True)), "the inputs stay as they were"
    fold.in_place(values)
    assert all(torch.equal(value, expected) for value in values)


@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([torch.float32, torch.int64, torch.bool]),
    op=st.sampled_from([None, *ReduceOp]),
    root=st.integers(0, 1023),
    nbytes=st.integers(0, 2**37),
)
def test_a_call_record_says_in_words_what_was_called(
    kind: str, dtype: torch.dtype, op: ReduceOp | None, root: int, nbytes: int
) -> None:
    text = describe(record(kind, dtype, op, root, nbytes))
    assert text.startswith(f"{kind}({dtype}")
    assert f"root {root}, {nbytes} bytes" in text
    assert op is None or op.value in text


@given(count=st.integers(0, 10_000), size=st.integers(1, 9), unit=st.sampled_from([1, 8, 16]))
def test_shares_cover_everything_once(count: int, size: int, unit: int) -> None:
    bounds = shares(count, size, unit)
    assert len(bounds) == size + 1
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert bounds == sorted(bounds)
    assert all(bound % unit == 0 or bound == count for bound in bounds)


def test_naps_grow_but_stay_short_enough_to_notice_a_lost_ring() -> None:
    lengths = [nap_length(n) for n in range(200)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 0.001
    assert lengths[-1] <= 0.02


def test_ranks_of_other_machines_and_users_cannot_share_memory() -> None:
    def identity(machine: str, uid: int) -> Identity:
        return Identity(machine=machine, host="h", pid=1, started=1, uid=uid)

    assert obstacle({0: identity("a", 0), 1: identity("a", 0)}) is None
    assert "rank 1 is on another machine" in str(obstacle({0: identity("a", 0), 1: identity("b", 0)}))
    assert "rank 1 runs as user 5, rank 0 as 0" in str(obstacle({0: identity("a", 0), 1: identity("a", 5)}))


def test_shared_tensors_are_found_by_any_part_of_them_and_freed_with_the_last() -> None:
    tensor = _shared_tensors.shared_empty((4, 100), torch.float32)
    assert tensor.shape == (4, 100)
    assert tensor.eq(0).all()
    part = tensor[1:3]
    allocation = _shared_tensors.find(part.data_ptr(), part.numel() * 4)
    assert allocation is not None
    assert os.fstat(allocation.fd).st_mode & 0o777 == 0o600
    assert _shared_tensors.find(part.data_ptr(), 4 * 400) is None, "beyond its end"
    assert _shared_tensors.find(torch.ones(4).data_ptr(), 16) is None
    freed: list[int] = []

    class User:
        def freed(self, allocation: _shared_tensors.Allocation) -> None:
            freed.append(allocation.serial)

    user = User()
    allocation.users.add(user)
    del tensor
    gc.collect()
    assert not freed, "a part still uses it"
    del part
    gc.collect()
    assert freed == [allocation.serial]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(allocation.fd)


def test_only_the_first_error_counts() -> None:
    transport = ShmTransport.create(MemoryStore(), 0, 1)
    first, second = PeerLost("first"), PeerLost("second")
    assert transport._engine.fail(first) is first
    assert transport._engine.fail(second) is first
    transport.close()
    with pytest.raises(PeerLost, match="first"):
        transport.barrier(async_op=False)


def test_empty_shared_tensors_are_plain() -> None:
    assert _shared_tensors.shared_empty((0, 3), torch.int64).shape == (0, 3)


def test_parts_of_one_tensor_are_one_span() -> None:
    whole = torch.arange(10.0)
    assert span(torch.split(whole, [3, 0, 7])) == (whole.data_ptr(), 40)
    assert span([whole[:3], whole[4:]]) is None
    assert span([torch.empty(0), whole[2:4], whole[4:6]]) == (whole.data_ptr() + 8, 16)
    assert span([torch.empty(0)]) == (0, 0)
