"""Makes ``trainer_runs`` importable in the tests beside it, and runs scripts once for several of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trainer_runs import Run  # beside this file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run a script once for each set of flags."""
    known: dict[tuple, Run] = {}

    def run(script: str, *flags: str, workers: int = 0) -> Run:
        key = (script, *flags, workers)
        if key not in known:
            known[key] = Run(script, tmp_path_factory.mktemp("run") / "job", *flags, workers=workers)
        return known[key]

    return run
