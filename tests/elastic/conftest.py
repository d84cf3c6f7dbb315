"""Makes ``elastic_training`` importable in tests and in the worker scripts beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cluster import NUM_STEPS, SCRIPT  # beside this file

from phalanx.elastic import _job as job_module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _closed_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the jobs that a test leaves open: each would keep its groups and files until the end of the process."""
    open_jobs: list[object] = []
    functions = SimpleNamespace(
        register=open_jobs.append,
        unregister=lambda function: open_jobs.remove(function) if function in open_jobs else None,
    )
    monkeypatch.setattr(job_module, "atexit", functions)
    yield
    for function in list(open_jobs):
        function.__self__.close()  # a method of the job


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps and digest of the workers' script in one process, without a launcher."""
    directory = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, str(SCRIPT), str(directory), str(NUM_STEPS), "0"]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "digest-rank0").read_text()
