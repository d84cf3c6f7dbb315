"""What every test process shares."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# torch looks the peer's name up for every connection; a question that a name server drops costs a second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# An example may take any time on a busy machine; in CI the examples are the same in every run.
settings.register_profile("phalanx", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("phalanx")

SOAK_TIMES = int(os.environ.get("SOAK_TIMES", "50"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``again`` runs once, and under ``make soak`` fifty times: a race that shows rarely shows there."""
    if metafunc.definition.get_closest_marker("again"):
        metafunc.fixturenames.append("turn")
        turns = [
            pytest.param(turn, marks=[pytest.mark.soak, pytest.mark.timeout(300)]) for turn in range(1, SOAK_TIMES)
        ]
        metafunc.parametrize("turn", [pytest.param(0, id="once"), *turns])
