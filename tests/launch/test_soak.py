"""Kills at random times, fifty of each: ``make soak``. The other fault tests are repeated there by their mark."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.launch.conftest import complete_rows as lines

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

TIMES = int(os.environ.get("SOAK_TIMES", "50"))


@pytest.mark.parametrize("turn", range(TIMES))
@pytest.mark.parametrize("policy", ["restart", "heal"])
def test_sigkill_at_a_random_time(launcher, tmp_path, wait_for, policy, turn):
    """Also while workers start, join or end: whatever is hit, the job finishes and nothing is left."""
    chance = random.Random(turn)
    script = "summing.py" if policy == "restart" else "healing.py"
    agent = launcher.run(
        "--nproc-per-node",
        3,
        "--on-failure",
        policy,
        "--max-restarts",
        5,
        script,
        tmp_path,
        40,
        STEP_SECONDS="0.01",
    )
    pids = _pids(tmp_path, policy)
    wait_for(lambda: len(pids()) == 3, "three workers", agent)
    victims = chance.sample(pids(), chance.choice([1, 1, 2]))
    time.sleep(chance.random() * 1.5)  # a random time, which is the point here
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had finished already
    assert agent.wait() == 0, agent.output
    launcher.wait_until_empty()


@pytest.mark.parametrize("turn", range(TIMES))
def test_sigkill_of_the_agent_at_a_random_time(launcher, tmp_path, wait_for, turn):
    agent = launcher.run("--nproc-per-node", 2, "children.py", tmp_path)
    chance = random.Random(turn)
    if chance.random() < 0.7:
        wait_for(lambda: lines(tmp_path / "pids"), "a worker", agent)
    time.sleep(chance.random() * 2.0)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    launcher.wait_until_empty()


def _pids(directory: Path, policy: str):
    def find() -> list[int]:
        if policy == "restart":
            return [int(row[4]) for row in lines(directory / "starts") if len(row) == 5]
        starts = [lines(path) for path in directory.glob("*.*.*")]
        return [int(story[0][1]) for story in starts if story and len(story[0]) == 2]

    return find
