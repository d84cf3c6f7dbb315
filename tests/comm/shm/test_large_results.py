"""Large results: the copy past the caches, in-place reductions, and slots that grow with the number of ranks."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from comm.shm.test_random import TINY, on_threads
from phalanx.comm import Group, ReduceOp
from phalanx.comm.transports._tree_reduce import tree_reduce
from phalanx.comm.transports.shm import _streaming_copy
from phalanx.comm.transports.shm._fold import Fold
from phalanx.comm.transports.shm._syscalls import copy_bytes
from shm_random import run_random


@pytest.fixture
def every_result_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streaming_copy, "STREAMED_BYTES", 0)
    assert _streaming_copy.copy_for(1) is not copy_bytes, "this machine has no such copy"


@pytest.mark.fast
def test_the_copy_past_the_caches_moves_just_its_bytes() -> None:
    copy = _streaming_copy._streaming()
    rng = random.Random(3)
    source = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    for _ in range(2000):
        start, to, nbytes = rng.randrange(200), rng.randrange(200), rng.choice([0, 1, 63, 64, 65, 128, 1000, 3000])
        target = torch.full((4096,), 7, dtype=torch.uint8)
        copy(target.data_ptr() + to, source.data_ptr() + start, nbytes)
        expected = torch.full((4096,), 7, dtype=torch.uint8)
        expected[to : to + nbytes] = source[start : start + nbytes]
        assert torch.equal(target, expected), (start, to, nbytes)


@pytest.mark.fast
@pytest.mark.parametrize("shift", [-64, -1, 1, 64, 100])
def test_the_copy_past_the_caches_of_overlapping_bytes_is_a_move(shift: int) -> None:
    buffer = torch.arange(2048).to(torch.uint8)
    expected = buffer.clone()
    expected[200 + shift : 1200 + shift] = buffer[200:1200]
    _streaming_copy._streaming()(buffer.data_ptr() + 200 + shift, buffer.data_ptr() + 200, 1000)
    assert torch.equal(buffer, expected)


@pytest.mark.fast
def test_where_executable_memory_is_refused_the_plain_copy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(_streaming_copy, "protect", refuse)
    assert _streaming_copy._streaming.__wrapped__() is copy_bytes


@pytest.mark.fast
def test_the_page_of_instructions_is_not_writable() -> None:
    copy = _streaming_copy._streaming()
    address = ctypes.addressof(ctypes.c_char.from_buffer(copy.__defaults__[0]))
    with open("/proc/self/maps") as maps:
        (line,) = [line for line in maps if int(line.split("-")[0], 16) <= address < int(line[13:25], 16)]
    assert line.split()[1] == "r-xs"


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 4])
def test_random_collectives_with_every_copy_past_the_caches(every_result_is_large: None, size: int) -> None:
    def main(group: Group) -> int:
        return run_random(group, 23 * size, 3000, lambda number: number < 100)

    assert on_threads(size, main, **TINY) == [100] * size


@pytest.mark.fast
@pytest.mark.parametrize("position", range(5))
def test_a_reduction_may_go_into_any_one_of_its_values(position: int) -> None:
    values = [torch.randn(33) for _ in range(5)]
    expected = tree_reduce(values, ReduceOp.SUM)
    Fold(ReduceOp.SUM, torch.float32, 5).into(values[position], values)
    assert torch.equal(values[position], expected)


@pytest.mark.fast
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_into_its_own_input(size: int, shared: bool) -> None:
    """As who keeps one flat gradient does: the shard is a view of the whole."""
    inputs = [torch.randn(size * 700, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def main(group: Group) -> torch.Tensor:
        whole = group.shared_empty((size * 700,), torch.float32) if shared else torch.empty(size * 700)
        whole.copy_(inputs[group.rank])
        own = whole.view(size, -1)[group.rank]
        group.reduce_scatter_tensor(own, whole)
        group.barrier()
        return own.clone()

    expected = tree_reduce(inputs, ReduceOp.SUM).view(size, -1)
    for found, row in zip(on_threads(size, main, **TINY), expected, strict=True):
        assert torch.equal(found, row)
