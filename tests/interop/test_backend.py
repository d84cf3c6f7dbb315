"""Every library of torch that stands on process groups, on the backend ``phalanx``: the results of gloo."""

from __future__ import annotations

import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from interop import programs, programs_of_libraries
from processes import Worker, run_processes

Results = dict[str, dict[str, object]]
NUM_RANKS = 4
PROGRAMS = [*programs.PROGRAMS, *programs_of_libraries.PROGRAMS]


def run_all(worker: Worker) -> Results:
    """Run each program on gloo and on ours; an error is a result too, so that others are still compared."""
    results: Results = {}
    for number, program in enumerate(PROGRAMS):
        for backend in ("gloo", "phalanx"):
            dist.init_process_group(
                backend,
                store=worker.store().namespace(f"{backend}/{number}").as_c10d(),
                rank=worker.rank,
                world_size=worker.size,
                timeout=timedelta(seconds=60),
            )
            try:
                result: object = program()
            except Exception:
                result = traceback.format_exc()
            results.setdefault(program.__name__, {})[backend] = result
            dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results() -> list[Results]:
    outcomes = run_processes(NUM_RANKS, run_all, timeout=280)
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def assert_alike(rank: int, expected: object, found: object) -> None:
    """What a program returned on gloo and on ours."""
    assert isinstance(expected, list), f"rank {rank} on gloo: {expected}"
    assert isinstance(found, list), f"rank {rank} on ours: {found}"
    assert len(expected) == len(found)
    for theirs, ours in zip(expected, found, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        else:
            assert ours == theirs, f"rank {rank}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_a_program_of_torch_gives_what_it_gives_on_gloo(results: list[Results], program: str) -> None:
    assert any(of_rank[program]["gloo"] for of_rank in results), "nothing to compare on any rank"
    for rank, of_rank in enumerate(results):
        assert_alike(rank, of_rank[program]["gloo"], of_rank[program]["phalanx"])
