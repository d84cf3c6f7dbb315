"""Makes ``elastic_training`` importable in tests and in the worker scripts beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cluster import NUM_STEPS, SCRIPT  # beside this file


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps and digest of the workers' script in one process, without a launcher."""
    directory = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, str(SCRIPT), str(directory), str(NUM_STEPS), "0"]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "digest-rank0").read_text()
