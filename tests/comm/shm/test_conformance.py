"""The conformance suite for collectives, unchanged, on the same-host transport."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from processes import run_processes

_path = Path(__file__).parent.parent / "test_collectives.py"
_spec = importlib.util.spec_from_file_location("conformance_suite", _path)
assert _spec is not None
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)


def run_all_cases(worker) -> str:
    group = worker.group(backend="auto")
    for case in suite.CASES:
        case(group)
        group.barrier()
    return group.backend


def test_every_case_of_the_suite_passes() -> None:
    outcomes = run_processes(suite.WORLD, run_all_cases)
    assert [outcome.value for outcome in outcomes] == ["shm"] * suite.WORLD
