"""The fault storm: every kind of fault at every moment of a job, one after the other, until three hundred have struck.

Unlike ``test_storms``, which hurts workers at random times, each fault here is laid out for a moment (see
``storm_script``): a start, a join, a state on its way, a save, an evaluation, the last step, what follows the loop.
Each job must end by itself with exit code 0, the result written, the bits of the undisturbed run and a clean audit.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from strangers import Stranger

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parent / "storm_script.py"
NUM_STEPS = 90
AHEAD = 5
"""Steps that a job may go on while it waits for a fault: there is a save and the end of an epoch among them."""

Strike = tuple[str, ...]
"""Faults as ``POINT.KIND`` that belong together: the first brings about the moment of the second."""

STRIKES: tuple[Strike, ...] = (
    ("micro.kill",),
    ("commit.kill",),
    ("save.kill",),
    ("evaluate.kill",),
    ("micro.kill", "start.kill"),
    ("commit.kill", "join.kill"),
    ("micro.kill", "send.kill"),
    ("micro.kill", "receive.kill"),
    ("micro.kill", "commit.kill"),
    ("micro.reset",),
    ("commit.reset",),
    ("evaluate.reset",),
    ("micro.kill", "receive.reset"),
    ("micro.stop",),
    ("commit.stop",),
    ("evaluate.stop",),
    ("micro.kill", "join.stop"),
)
NEWCOMERS = ("start", "join", "receive")
"""Points of workers that have no step yet."""
ENDINGS: tuple[Strike, ...] = (
    ("last.kill", "after.kill"),
    ("after.kill", "end.kill"),
    ("last.reset", "after.kill"),
    ("last.kill", "end.kill"),
    ("last.stop", "end.kill"),
)


class Storm:
    """One job, and the faults that are laid out for it."""

    def __init__(self, directory: Path, num_workers: int, *, gloo: bool) -> None:
        self.faults, self.struck = directory / "faults", directory / "struck"
        for folder in (self.faults, self.struck):
            folder.mkdir(parents=True)
        self.num_laid = 0
        options = {"hang_timeout": "60", "max_restarts": "1000", "script_flag": "--gloo" if gloo else ""}
        self.cluster = Cluster(directory, num_workers, NUM_STEPS, hold=1, script=SCRIPT, **options)
        self.stranger: Stranger | None = None

    def lay_out(self, strike: Strike, step: int) -> None:
        for fault in strike:
            at, kind = fault.split(".")
            self.num_laid += 1
            (self.faults / f"{self.num_laid:03d}.{at}.{0 if at in NEWCOMERS else step}.{kind}").touch()

    def let_stranger_in(self, seed: int) -> None:
        """Somebody without the job's secret writes garbage over every key of its store, until the end."""
        self.cluster.wait_step(1)
        self.stranger = Stranger((self.cluster.directory / "store").read_text(), pause=0.1, seed=seed)

    def close(self) -> None:
        if self.stranger is not None:
            self.stranger.stop()
        self.cluster.close()

    def has_struck(self) -> bool:
        return len(list(self.struck.iterdir())) == self.num_laid

    def strike(self, strike: Strike) -> None:
        """Let it happen soon, and wait until all of it has, and a step was committed since."""
        step = self.cluster.step()
        self.cluster.hold(step + AHEAD)
        self.lay_out(strike, step)
        self.cluster.wait_until(self.has_struck, f"{strike} at step {step}")
        step = self.cluster.step()
        self.cluster.hold(step + 2)
        self.cluster.wait_step(step + 1)


def run_storm(directory: Path, undisturbed: str, seed: int, num_strikes: int) -> int:
    """How many faults a job has survived. Every second one runs over gloo, every third one has a stranger."""
    chance = random.Random(seed)
    storm = Storm(directory, chance.randint(2, 4), gloo=seed % 2 == 0)
    try:
        if seed % 3 == 0:
            storm.let_stranger_in(seed)
        ending = chance.choice(ENDINGS)
        strikes = chance.sample(STRIKES, num_strikes)
        for strike in strikes:
            storm.strike(strike)
        assert storm.cluster.step() < NUM_STEPS - 1, "the job was nearly over before the last fault"
        storm.lay_out(ending, NUM_STEPS - 1)
        storm.cluster.release()
        storm.cluster.finish(timeout=300)
    finally:
        storm.close()
    history = [*strikes, ending]
    assert storm.has_struck(), f"of {history} not all came: {sorted(storm.faults.iterdir())}"
    assert (directory / "result").exists(), f"after {history} the result is missing"
    assert {(directory / "result").read_text(), *storm.cluster.digests()} == {undisturbed}, f"after {history}"
    return storm.num_laid


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps, digest and score of the storm's script in one process, without a launcher."""
    directory = tmp_path_factory.mktemp("quiet")
    for folder in ("faults", "struck"):
        (directory / folder).mkdir()
    subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), str(NUM_STEPS), "0"], check=True, timeout=300
    )
    return (directory / "result").read_text()


def test_a_sample_of_the_storm(tmp_path, undisturbed):
    assert run_storm(tmp_path / "job", undisturbed, seed=1, num_strikes=5) >= 7


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_three_hundred_faults_lose_nothing(tmp_path, undisturbed):
    survived = 0
    for seed in range(100, 200):
        survived += run_storm(tmp_path / str(seed), undisturbed, seed, num_strikes=9)
        if survived >= 300:
            break
    assert survived >= 300
