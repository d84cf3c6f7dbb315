"""Users' programs with torch's imports and with ours, on the same gloo processes: the same results."""

from __future__ import annotations

import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from interop import training_programs, user_programs
from interop.imports import load
from processes import Worker, run_processes

NUM_RANKS = 4
MODULES = (user_programs, training_programs)
HOMES = {program.__name__: module for module in MODULES for program in module.PROGRAMS}
assert len(HOMES) == sum(len(module.PROGRAMS) for module in MODULES), "results are told apart by the program's name"
Results = dict[str, dict[str, object]]


def run_both(worker: Worker) -> Results:
    """Each program as it is, then with our imports; an error is a result too, so that others are still compared."""
    store = worker.store().namespace("users").as_c10d()
    dist.init_process_group(
        "gloo", store=store, rank=worker.rank, world_size=worker.size, timeout=timedelta(seconds=60)
    )
    results: Results = {name: {} for name in HOMES}
    for whose in ("torch", "ours"):
        loaded = {module: load(Path(module.__file__), ours=whose == "ours") for module in MODULES}
        for name, home in HOMES.items():
            module = loaded[home]
            torch.manual_seed(worker.rank)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    results[name][whose] = getattr(module, name)()
            except Exception:
                results[name][whose] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return [outcome.value for outcome in run_processes(NUM_RANKS, run_both, timeout=280)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", HOMES)
def test_changing_the_imports_is_the_whole_migration(results: list[Results], program: str) -> None:
    for rank, of_rank in enumerate(results):
        expected, found = of_rank[program]["torch"], of_rank[program]["ours"]
        assert isinstance(expected, list), f"rank {rank} with torch's imports: {expected}"
        assert isinstance(found, list), f"rank {rank} with ours: {found}"
        assert expected, "nothing to compare"
        assert len(expected) == len(found)
        for theirs, ours in zip(expected, found, strict=True):
            if isinstance(theirs, torch.Tensor):
                assert type(ours) is torch.Tensor
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            else:
                assert ours == theirs, f"rank {rank}"
