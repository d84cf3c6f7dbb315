"""Ranks in one process: determinism, errors, deadlocks, scripted faults."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from phalanx.comm import faults, simulate
from phalanx.comm.simulation._scheduler import Scheduler
from phalanx.errors import (
    CollectiveMismatch,
    PeerLost,
    PeerTimeout,
    RankFailed,
    SimulatedDeadlock,
    SimulationError,
)

pytestmark = pytest.mark.fast


def test_interleaving_is_the_same_every_time() -> None:
    def trace() -> list[str]:
        log: list[str] = []

        def main(group) -> None:
            for step in range(3):
                log.append(f"{group.rank}:{step}")
                group.barrier()

        simulate(4).run(main)
        return log

    first = trace()
    assert sorted(first) == sorted(f"{r}:{s}" for r in range(4) for s in range(3))
    assert all(trace() == first for _ in range(5))


def test_each_rank_has_its_own_random_numbers() -> None:
    def main(group):
        torch.manual_seed(group.rank)
        first = torch.rand(1).item()
        group.barrier()
        return first, torch.rand(1).item()

    for rank, drawn in enumerate(simulate(3).run(main)):
        torch.manual_seed(rank)
        assert drawn == (torch.rand(1).item(), torch.rand(1).item())


def test_the_first_error_is_reported_with_its_rank_and_the_others_are_released() -> None:
    cleaned: list[int] = []
    before = set(threading.enumerate())

    def main(group) -> None:
        try:
            if group.rank == 2:
                raise KeyError("lost")
            group.barrier()
        finally:
            cleaned.append(group.rank)

    with pytest.raises(RankFailed, match="rank 2 of 4 raised KeyError: 'lost'") as caught:
        simulate(4).run(main)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert sorted(cleaned) == [0, 1, 2], "rank 3 had not begun"
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("rank-")]


def test_a_deadlock_says_what_each_rank_waits_for() -> None:
    def main(group) -> None:
        if group.rank == 0:
            group.recv(torch.zeros(1), src=1, tag=5)
        else:
            group.barrier()

    with pytest.raises(SimulatedDeadlock) as caught:
        simulate(3).run(main)
    text = str(caught.value)
    assert "rank 0: waits for a message from rank 1 with tag 5" in text
    assert "rank 2: waits for barrier() (number 0) of ranks [0] of [0, 1, 2]" in text


def test_mismatched_calls_are_found() -> None:
    def main(group) -> None:
        group.all_reduce(torch.zeros(2 + group.rank))

    with pytest.raises(RankFailed, match=r"rank 1: all_reduce\(float32, \[3\], sum\)") as caught:
        simulate(2).run(main)
    assert isinstance(caught.value.__cause__, CollectiveMismatch)


class Gate(threading.Event):
    """Knows whether somebody has come to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def test_a_rank_blocked_outside_of_collectives_is_reported_with_its_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, blocked = Gate(), []

    class TimeIsOver(threading.Event):
        """The wait for the simulation's end: it lasts until the rank stands where it will stay."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == 0.2
            assert gate.reached.wait(60)
            return False

    def schedule(size: int) -> Scheduler:
        scheduler = Scheduler(size)
        scheduler.finished = TimeIsOver()
        return scheduler

    def main(group) -> None:
        if group.rank == 0:
            blocked.append(threading.current_thread())
            gate.wait()

    monkeypatch.setattr("phalanx.comm.simulation._simulate.Scheduler", schedule)
    monkeypatch.setattr("phalanx.comm.simulation._simulate._PATIENCE", 0.0)
    with pytest.raises(SimulationError, match=r"did not end within 0.2 s(.|\n)*gate.wait") as caught:
        simulate(2, timeout=0.2).run(main)
    assert "the threads of ranks [0, 1] have not ended" in str(caught.value)
    gate.set()
    blocked[0].join(60)


def test_the_end_of_a_simulation_is_waited_for_as_long_as_was_asked_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    monkeypatch.setattr("phalanx.comm.simulation._simulate._PATIENCE", 0.0)
    with pytest.raises(SimulationError, match=r"of 1 ranks did not end within 0.1 s"):
        simulate(1, timeout=0.1).run(lambda group: gate.wait())
    gate.set()


@pytest.mark.parametrize("size", [1, 3])
def test_no_rank_outlives_a_simulation_that_is_given_up(size: int) -> None:
    """One that went on would draw from, and seed, the generator of whatever the process does next."""
    before, cleaned = set(threading.enumerate()), []

    def main(group) -> None:
        try:
            while True:
                torch.manual_seed(group.rank)
                group.barrier()
        finally:
            cleaned.append(group.rank)

    with pytest.raises(SimulationError, match=f"of {size} ranks did not end within 0.2 s") as caught:
        simulate(size, timeout=0.2).run(main)
    assert "have not ended" not in str(caught.value)
    assert set(threading.enumerate()) <= before
    assert sorted(cleaned) == list(range(size))


def test_no_rank_outlives_a_simulation_whose_caller_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the time limit of a test does it, or the user."""
    before, running = set(threading.enumerate()), threading.Event()

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert running.wait(60)
            raise KeyboardInterrupt

    def schedule(size: int) -> Scheduler:
        scheduler = Scheduler(size)
        scheduler.finished = Interrupted()
        return scheduler

    def main(group) -> None:
        while True:
            group.barrier()
            running.set()

    monkeypatch.setattr("phalanx.comm.simulation._simulate.Scheduler", schedule)
    with pytest.raises(KeyboardInterrupt):
        simulate(2).run(main)
    assert set(threading.enumerate()) <= before


def test_survivors_of_a_scripted_death_get_peer_lost_and_go_on_in_a_subgroup() -> None:
    def main(group):
        with faults.play(faults.kill_at(rank=1, step=2)):
            group.barrier()
            group.barrier()
            with pytest.raises(PeerLost) as caught:
                group.all_reduce(torch.ones(1))
        rest = group.subgroup([0, 2])
        tensor = torch.ones(1)
        rest.all_reduce(tensor)
        return caught.value.ranks, tensor.item()

    assert simulate(3).run(main) == [((1,), 2.0), None, ((1,), 2.0)]


def test_a_scripted_hang_gives_peer_timeout() -> None:
    def main(group):
        with faults.play(faults.hang_at(rank=0, step=1)):
            group.barrier()
            with pytest.raises(PeerTimeout, match="rank 0 of generation 0 hangs"):
                group.barrier()
        return True

    assert simulate(3).run(main) == [None, True, True]


def test_a_scripted_failure_raises_in_its_rank_only() -> None:
    def main(group):
        with faults.play(faults.fail_at(rank=1, step=0, name="broadcast")):
            group.barrier()
            group.broadcast(torch.ones(1), 0)

    with pytest.raises(RankFailed, match="rank 1 was told to fail at collective 0") as caught:
        simulate(2).run(main)
    assert isinstance(caught.value.__cause__, faults.InjectedFailure)


def test_a_rank_that_loses_a_result_has_taken_part_and_its_peers_have_the_result() -> None:
    def main(group):
        tensor = torch.ones(1)
        with faults.play(faults.lose_result_at(rank=1, step=1, name="all_reduce")):
            group.all_reduce(tensor)
            if group.rank == 1:
                with pytest.raises(PeerLost, match="rank 1 was told to lose contact at the end of all_reduce"):
                    group.all_reduce(tensor)
                with pytest.raises(PeerLost, match="told to lose contact"):
                    group.barrier()
            else:
                group.all_reduce(tensor)
        return tensor.item()

    assert simulate(3).run(main)[::2] == [9.0, 9.0]


def test_a_scripted_delay_makes_its_rank_late_once_and_changes_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    clock = SimpleNamespace(sleep=lambda seconds: log.append(f"late by {seconds}"))
    monkeypatch.setattr(faults, "time", clock)

    def main(group) -> float:
        tensor = torch.tensor([group.rank + 1.0])
        with faults.play(faults.delay_at(rank=1, step=1, seconds=90.0, name="all_reduce")):
            group.all_reduce(tensor)
            group.barrier()
            if group.rank == 1:
                log.append("comes")
            group.all_reduce(tensor)
            if group.rank == 1:
                log.append("has it")
            group.all_reduce(tensor)
        return tensor.item()

    assert simulate(3).run(main) == [54.0] * 3
    assert log == ["comes", "late by 90.0", "has it"]


def test_polling_for_completion_lets_the_others_run() -> None:
    def main(group):
        work = group.all_reduce(torch.ones(1), async_op=True)
        polls = 0
        while not work.is_done():
            polls += 1
        return polls < 100

    assert simulate(3).run(main) == [True] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", [120, 32]), ("max", [15, 2]), ("min", [0, 2])])
def test_sixteen_ranks_in_one_process_reduce_as_sixteen_processes_would(op: str, expected: list[int]) -> None:
    def main(group) -> list[int]:
        tensor = torch.tensor([group.rank, 2])
        group.all_reduce(tensor, op)
        return tensor.tolist()

    assert simulate(16).run(main) == [expected] * 16


def test_hundreds_of_ranks_work() -> None:
    def main(group):
        tensor = torch.tensor([1])
        group.all_reduce(tensor)
        return tensor.item()

    assert simulate(200).run(main) == [200] * 200


def test_needs_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        simulate(0)
