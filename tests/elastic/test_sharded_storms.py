"""Storms against a sharded job of real processes: the same strikes, the bits of the unsharded job, a clean audit.

Some strikes take as many workers at once as there are copies: then the job may go back to its last save, by itself.
After all others it must not. Half of the storms have no saves at all, and no such strikes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster import NUM_STEPS, SCRIPT
from test_storms import storm

pytestmark = pytest.mark.timeout(400)

FIRST = 8
"""No strike before there is a save: what is lost beyond the copies before it ends all workers (``CellsLost``)."""


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps and digest of the same job unsharded, in one process."""
    directory = tmp_path_factory.mktemp("unsharded")
    command = [sys.executable, str(SCRIPT), str(directory), str(NUM_STEPS), "0"]
    subprocess.run(command, check=True, timeout=300)
    return (directory / "digest-rank0").read_text()


def test_a_storm_leaves_no_trace_in_the_bits_of_a_sharded_job(tmp_path, unsharded):
    found = storm(tmp_path / "job", 1, "--save --copies=2", FIRST, 2)
    assert found.digests == {unsharded}, f"after {found.kinds}"


def test_a_storm_within_the_copies_needs_no_saves(tmp_path, unsharded):
    found = storm(tmp_path / "job", 3, "--copies=2", 2, 2, gentle=True)
    assert found.digests == {unsharded}, f"after {found.kinds}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200, 230))
def test_thirty_storms_against_a_sharded_job(tmp_path, unsharded, seed):
    copies = 2 + seed % 2
    if seed % 4 < 2:
        found = storm(tmp_path / "job", seed, f"--save --copies={copies}", FIRST, copies)
    else:
        found = storm(tmp_path / "job", seed, f"--copies={copies}", 2, copies, gentle=True)
    assert found.digests == {unsharded}, f"after {found.kinds}"
