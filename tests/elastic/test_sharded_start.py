"""A sharded job says at its start what each worker holds and what a loss would cost, as it is spread."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
from sharded_training import make_job, train

from phalanx.comm import simulate
from phalanx.elastic import RunOptions
from phalanx.elastic.sharded import _sharding

SIZE = 4
PER_NODE = 2


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Where the calling thread's worker is said to run."""
    here = threading.local()
    monkeypatch.setattr(_sharding, "World", SimpleNamespace(from_env=lambda: SimpleNamespace(node_rank=here.node_rank)))
    return here


def start(group, place, copies, spread, progress=True):
    """Train a step on two nodes; which workers hold each cell."""
    place.node_rank = group.rank // PER_NODE
    run = RunOptions(progress=progress, group=group, threads=1)
    job = make_job(copies=copies, spread=spread, run=run)
    train(job, max_steps=1)
    return [[job.sharding.workers.index(worker) for worker in each] for each in job.sharding.holdings.holders]


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "copies=" in line]


TWO = r"copies=2: 4 workers hold [\d.]+%( to [\d.]+%)? of the state each\. Any 1 loss costs nothing\. "
TWO += r"The loss of 2 goes back to the last save in \d of 6 cases"


@pytest.mark.parametrize(
    ("copies", "spread", "expected"),
    [
        (1, "node", r"copies=1: 4 workers hold [\d.]+%( to [\d.]+%)? of the state each\. "
                    r"The loss of any goes back to the last save"),
        (2, "node", TWO + r"\. The loss of any node costs nothing"),
        (2, "worker", TWO),
        ("all", "node", r"copies=all: 4 workers hold 100% of the state each\. Any 3 losses cost nothing\. The loss of "
                        r"4 goes back to the last save in 1 of 1 cases\. The loss of any node costs nothing"),
    ],
)  # fmt: skip
def test_the_first_worker_says_once_what_is_held_and_what_a_loss_costs(capsys, place, copies, spread, expected):
    simulate(SIZE).run(start, place, copies, spread)
    (line,) = told(capsys)
    assert re.fullmatch(f"phalanx: {expected}", line), line


def test_copies_lie_on_other_nodes_unless_they_may_lie_anywhere(capsys, place):
    def shared_nodes(spread):
        (holders, *_) = simulate(SIZE).run(start, place, 2, spread, False)
        return sum(len({worker // PER_NODE for worker in each}) == 1 for each in holders)

    assert shared_nodes("node") == 0
    assert shared_nodes("worker") > 0
    assert told(capsys) == [], "without progress nothing is said"
