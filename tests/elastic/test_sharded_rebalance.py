"""Sharded workers are lost in the middle of a transfer: while a newcomer is filled, while leavers hand over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_world import Die
from sharded_training import make_job, train, weights
from sharded_world import Fault, ShardedWorld

from log_lines import read_lines
from phalanx.comm import observe
from phalanx.elastic import RunOptions
from phalanx.elastic.audit import check_directory
from phalanx.elastic.sharded import _sharding, _slices

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 12
MESSAGES = 2
"""Of a transfer, how many go through before its end: length and header, so that only the cells are missing."""


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Any], str]:
    job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    return train(job, max_steps=NUM_STEPS), weights(job)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardedWorld:
    made = ShardedWorld(tmp_path, monkeypatch)
    made.num_steps = NUM_STEPS
    return made


def check(world, results, undisturbed, workers):
    told = {one[0]: one for one in undisturbed[0]}
    for worker in workers:
        assert results[worker] == undisturbed[1], (worker, results[worker])
        assert all(one == told[one[0]] for one in world.told[worker].steps)
    verdict = check_directory(world.directory)
    assert (verdict.problems, verdict.num_steps) == ([], world.num_steps)


class MidTransfer:
    """The first worker whose part of a transfer of cells is ``meant`` dies with its first messages sent or received."""

    def __init__(self, world: ShardedWorld, meant: Callable[[str, str, str], bool], workers: str) -> None:
        """``meant(what, worker, other)``: ``what`` is "send" or "recv", ``other`` the worker at the other end."""
        self.world = world
        self.meant = meant
        self.workers = workers
        self.victim = ""
        self._once = threading.Lock()

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        send, receive = _slices.send_state, _slices.receive_state

        def send_some(group, state, dst):
            self._choose("send", dst)
            return send(group, state, dst)

        def receive_some(group, src):
            self._choose("recv", src)
            return receive(group, src)

        monkeypatch.setattr(_slices, "send_state", send_some)
        monkeypatch.setattr(_slices, "receive_state", receive_some)
        with observe(self._watch):
            yield

    def _choose(self, what: str, other: int) -> None:
        here = self.world.here
        with self._once:
            if not self.victim and self.meant(what, here.job.worker_id, here.job.sharding.workers[other]):
                self.victim, here.messages_left = here.job.worker_id, MESSAGES

    def _watch(self, event: Any) -> None:
        left = getattr(self.world.here, "messages_left", None)
        if left is None:
            return
        self.world.here.messages_left = left - 1 if left else None
        if not left:
            survivors = tuple(worker for worker in self.workers if worker != self.victim)
            self.world.kill(self.world.here.job, Fault(self.victim, -1, -1, survivors))


@pytest.mark.parametrize("dies", ["source", "newcomer"])
def test_a_worker_that_dies_while_a_newcomer_is_filled_costs_nothing(world, undisturbed, monkeypatch, dies):
    world.faults = (Fault("b", 2, 9, ("a", "d", "c")),)
    is_meant = {
        "source": lambda what, worker, other: (what, other) == ("send", "d"),
        "newcomer": lambda what, worker, other: (what, worker) == ("recv", "d"),
    }
    transfer = MidTransfer(world, is_meant[dies], "acd")
    started = threading.Event()

    def on_step(job, step):
        if step.number == 5 and job.worker_id == "a" and not started.is_set():
            started.set()
            world.start("d", 1)
            world.await_newcomer()

    world.agree(0, *"abc")
    with world.watching(), transfer.watching(monkeypatch):
        for worker in "abc":
            world.start(worker, on_step=on_step)
        results = world.join()
    assert isinstance(results[transfer.victim], Die)
    assert (transfer.victim == "d") == (dies == "newcomer")
    check(world, results, undisturbed, [worker for worker in "acd" if worker != transfer.victim])
    if dies == "source":
        moved = [line for line in read_lines(world.directory / "events-d.jsonl") if line.get("event") == "cells_moved"]
        assert sum(line["cells"] for line in moved) > 0, "the other source filled it"


@pytest.mark.parametrize("what", ["send", "recv"])
def test_a_worker_that_dies_while_leavers_hand_over_costs_nothing(world, undisturbed, monkeypatch, what):
    """Two of four leave, and cells that they alone hold go to the others. Both leave all the same, a step later."""
    hand_over = _sharding.hand_over

    def noted(sharding, leaving):
        world.here.hands_over = True
        try:
            hand_over(sharding, leaving)
        finally:
            world.here.hands_over = False

    monkeypatch.setattr(_sharding, "hand_over", noted)
    transfer = MidTransfer(
        world, lambda found, *_: found == what and getattr(world.here, "hands_over", False), workers="abcd"
    )

    def leave(job, step):
        if step.number == 3:
            job.regrouping.leave.requested = True

    world.agree(0, *"abcd")
    with transfer.watching(monkeypatch):
        for worker in "abcd":
            world.start(worker, **({"on_step": leave} if worker in "bc" else {}))
        for thread in world.threads[1:3]:
            thread.join(200)
        assert isinstance(world.results[transfer.victim], Die)
        left = [worker for worker in "bc" if worker != transfer.victim]
        assert all(isinstance(world.results[worker], SystemExit) for worker in left), world.results
        staying = [worker for worker in "ad" if worker != transfer.victim]
        world.break_(1, *left)
        world.agree(2, *staying)
        results = world.join()
    assert (transfer.victim in "bc") == (what == "send")
    check(world, results, undisturbed, staying)
    assert (4, "dropped") in world.told[staying[0]].outcomes, "nobody left before all had what they were sent"
