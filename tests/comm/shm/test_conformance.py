"""The conformance suite for collectives, unchanged, on the same-host transport; and every dtype that torch has."""

from __future__ import annotations

import pytest
import torch

from comm.shm.test_random import TINY, on_threads
from comm.test_collectives import ONE_LEVEL_CASES, WORLD
from phalanx.comm import Group
from processes import run_processes


def run_all_cases(worker) -> str:
    group = worker.group(backend="auto")
    for case in ONE_LEVEL_CASES:
        case(group)
        group.barrier()
    return group.backend


def test_every_case_of_the_suite_passes() -> None:
    assert [outcome.value for outcome in run_processes(WORLD, run_all_cases)] == ["shm"] * WORLD


_ALL = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPES = sorted((d for d in _ALL if not str(d).startswith(("torch.q", "torch.bits"))), key=str)
"""All but the quantized ones, which are refused, and those without a meaning."""


def filled(rank: int, dtype: torch.dtype, num_bytes: int = 4800) -> torch.Tensor:
    """Bytes of 0 and 1, which every dtype can hold."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_of_torch_travels() -> None:
    def main(group: Group) -> list[torch.dtype]:
        other = 1 - group.rank
        for dtype in DTYPES:
            mine, theirs = filled(group.rank, dtype), bits(filled(other, dtype))
            outputs = [torch.empty_like(mine) for _ in range(2)]
            group.all_gather(outputs, mine)
            assert bits(outputs[other]) == theirs, dtype
            received = torch.empty_like(mine)
            sending = group.send(mine, other, async_op=True)
            group.recv(received, other)
            sending.wait()
            assert bits(received) == theirs, dtype
            group.broadcast(mine, src=1)
            assert bits(mine) == bits(filled(1, dtype)), dtype
        return DTYPES

    assert {torch.float8_e4m3fn, torch.uint16, torch.complex128, torch.bool} < set(DTYPES)
    assert on_threads(2, main, **TINY) == [DTYPES, DTYPES]
