"""The slot tree of workers of one host runs on shared memory: the same bits, nothing copied into a slot first."""

from __future__ import annotations

import pytest
import torch

from elastic.test_exchange import SHAPES, reduce, reference
from phalanx.comm import Group
from phalanx.comm.transports.shm import _shared_tensors
from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._partials import Partials, Pool
from phalanx.elastic.reduce._reduction import Reduction
from processes import run_processes

pytestmark = pytest.mark.timeout(300)


def sum_on_shared_memory(worker, num_slots: int) -> list[bool]:
    group = worker.group(backend="auto", timeout=120.0)
    assert group.backend == "shm"
    params = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in SHAPES]
    grads, *_ = reduce(group, num_slots, params)
    group.barrier()
    return [torch.equal(a, b) for a, b in zip(grads, reference(num_slots), strict=True)]


@pytest.mark.parametrize(("size", "num_slots"), [(2, 8), (3, 5), (4, 4)])
def test_the_sum_has_the_bits_of_the_naive_fold(size: int, num_slots: int) -> None:
    for outcome in run_processes(size, sum_on_shared_memory, num_slots, timeout=250.0):
        assert all(outcome.value)


def count_copies(worker, count: int) -> tuple[int, bool]:
    """Bytes that this worker put into slots for one large reduction, and whether its result is right."""
    group: Group = worker.group(backend="auto", timeout=120.0)
    pool = Pool(FlatLayout.of([torch.nn.Parameter(torch.zeros(count))], []), 16)
    private = pool.take()
    pool.give(private)
    exchange, partials = Reduction(group, group.size, pool), Partials(pool, group.size)
    partials.push(worker.rank, [torch.full((count,), worker.rank + 1.0)], {})
    tensor = partials.pieces[0][1].tensors[0]
    assert _shared_tensors.find(tensor.data_ptr(), 4 * count) is not None, "a copy in private memory was used again"
    window = group._transport._window
    copied = []
    put = window.put
    window.put = lambda n, address, nbytes, offset=0: (copied.append(nbytes), put(n, address, nbytes, offset))
    root = exchange.reduce(partials)
    del window.put
    group.barrier()
    return sum(copied), bool(root.grads[0].eq(group.size * (group.size + 1) / 2).all())


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_sum_is_not_copied_through_slots(size: int) -> None:
    count = 3_000_000
    for outcome in run_processes(size, count_copies, count, timeout=250.0):
        copied, right = outcome.value
        assert right
        # The meeting that decides carries the first pieces of the all_to_all, at most one slot.
        assert copied <= 512 * 1024, f"{copied} of {4 * count} bytes went through slots"
