"""The conformance suite for collectives, unchanged, on the same-host transport."""

from __future__ import annotations

from comm.test_collectives import CASES, WORLD
from processes import run_processes


def run_all_cases(worker) -> str:
    group = worker.group(backend="auto")
    for case in CASES:
        case(group)
        group.barrier()
    return group.backend


def test_every_case_of_the_suite_passes() -> None:
    assert [outcome.value for outcome in run_processes(WORLD, run_all_cases)] == ["shm"] * WORLD
