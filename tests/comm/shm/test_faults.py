"""Ranks that die, stop, leave or disagree, with real processes: the others get the right error, and go on."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from phalanx.comm._shm import _engine
from phalanx.comm._shm import _layout as L
from phalanx.errors import CollectiveMismatch, GroupAborted, PeerLost, PeerTimeout
from processes import run_processes

TIMEOUT = 60.0
"""Of the groups here; what must be noticed by other means than the timeout is noticed well before."""
NOTICED = 20.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loss_of(call) -> tuple[float, PeerLost]:
    """How long the call took to raise ``PeerLost``."""
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        call()
    return time.monotonic() - started, caught.value


def survive_a_death(worker, doing: str) -> tuple[int, ...]:
    """Rank 1 is killed, at several points of a collective; the others see it, and regroup without it."""
    group = worker.group(backend="auto", timeout=TIMEOUT)
    assert group.backend == "shm"
    large = torch.ones(1 << 20)
    shared = group.shared_empty((1 << 20,), torch.float32)
    group.all_reduce(shared)
    if worker.rank == 1:
        if doing == "halfway":  # of a large all_reduce, with the others waiting in it
            steps = group._transport._engine
            raise_flag, count = steps.raise_flag, 0

            def flag_and_die(index: int, value: int) -> None:
                nonlocal count
                count += 1
                if count == 5:
                    die()
                raise_flag(index, value)

            steps.raise_flag = flag_and_die
            group.all_reduce(large)
        die()
    call = {
        "before": lambda: group.all_reduce(torch.ones(4)),
        "halfway": lambda: group.all_reduce(large),
        "shared": lambda: group.all_reduce(shared),
        "async": lambda: group.all_reduce(large, async_op=True).wait(),
        "recv": lambda: group.recv(torch.ones(1), src=1),
        "gather": lambda: group.gather(torch.ones(1), [torch.ones(1)] * 3 if worker.rank == 0 else None, 0),
        "broadcast": lambda: group.broadcast(large, src=1),
    }[doing]
    took, error = loss_of(call)
    assert took < NOTICED
    _, again = loss_of(lambda: group.all_reduce(torch.ones(1)))
    assert again is error, "every later call raises the same"
    group.close()
    rank = {0: 0, 2: 1}[worker.rank]
    regrouped = worker.group(backend="auto", timeout=TIMEOUT, generation=1, rank=rank, size=2)
    regrouped.all_reduce(shared.fill_(1.0))
    assert shared.eq(2.0).all(), "shared memory outlives the group it was made for"
    regrouped.close()
    return error.ranks


@pytest.mark.parametrize("doing", ["before", "halfway", "shared", "async", "recv", "gather", "broadcast"])
def test_a_killed_rank_is_lost_and_the_rest_regroups(doing: str) -> None:
    outcomes = run_processes(3, survive_a_death, doing)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert [outcomes[r].value for r in (0, 2)] == [(1,), (1,)]


def be_rung_by_a_death(worker) -> bool:
    """Rank 1 dies when rank 0 sleeps, for far longer than it is given: only a ring can wake it in time."""
    group = worker.group(backend="auto", timeout=10 * TIMEOUT)
    group.barrier()
    engine, store = group._transport._engine, worker.store()
    asleep = engine.segment.layout.block(0) + L.ASLEEP
    if worker.rank == 1:
        store.wait(["about to sleep"], 60.0)
        while not engine.words[asleep]:
            time.sleep(0.001)
        die()
    _engine.nap_length = lambda naps: 5 * TIMEOUT
    engine.words[asleep] = 0  # it may tell of an earlier nap
    store.set("about to sleep", b"")
    took, error = loss_of(lambda: group.recv(torch.ones(1), src=1))
    return took < TIMEOUT and error.ranks == (1,)


def test_a_death_wakes_who_sleeps_long() -> None:
    assert [o.value for o in run_processes(2, be_rung_by_a_death)] == [True, None]


def meet_a_stopped_rank(worker) -> tuple[str, tuple[int, ...]]:
    group = worker.group(backend="auto", timeout=8.0)  # also the time to form it and to pass the barrier
    group.barrier()
    if worker.rank == 1:
        worker.store().set("stopping", b"")
        os.kill(os.getpid(), signal.SIGSTOP)
    worker.store().wait(["stopping"], 60.0)
    try:
        group.all_reduce(torch.ones(1 << 18))
    except (PeerTimeout, PeerLost) as error:
        result = type(error).__name__, error.ranks
    worker.store().add("noticed")
    while worker.rank == 0 and int(worker.store().add("noticed", 0)) < 2:
        time.sleep(0.01)
    return result


def test_a_stopped_rank_times_out() -> None:
    outcomes = run_stopped(meet_a_stopped_rank)
    assert [outcomes[r].error for r in (0, 2)] == ["", ""]
    kinds = [outcomes[r].value[0] for r in (0, 2)]
    assert "PeerTimeout" in kinds, kinds
    assert all(ranks == (1,) for kind, ranks in (outcomes[r].value for r in (0, 2)) if kind == "PeerTimeout")


def run_stopped(main):
    """Run three processes of which rank 1 stops itself; it is killed when the others are done."""
    import tempfile
    from pathlib import Path

    from phalanx.comm.stores import TCPStore
    from processes import Processes

    store = TCPStore.serve()
    with tempfile.TemporaryDirectory() as folder:
        running = Processes(3, main, (), store.address, Path(folder))
        try:
            for rank in (0, 2):
                running.processes[rank].join(60)
            running.processes[1].kill()
            return running.collect(60)
        finally:
            running.kill()
            store.close()


def abort_while_waiting(worker) -> str:
    group = worker.group(backend="auto", timeout=TIMEOUT)
    group.barrier()
    if worker.rank == 0:
        store = worker.store()
        cause = GroupAborted("enough")

        def abort_soon() -> None:
            store.wait(["waiting"], 60.0)
            group._transport.abort(cause)

        thread = threading.Thread(target=abort_soon)
        thread.start()
        worker.store().set("waiting", b"")
        with pytest.raises(GroupAborted, match="enough") as caught:
            group.barrier()
        thread.join()
        assert caught.value is cause
        store.wait(["told"], 60.0)
        return "aborted"
    worker.store().wait(["waiting"], 60.0)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 left the group") as caught:
        group.recv(torch.empty(1), src=0)
    assert time.monotonic() - started < NOTICED
    worker.store().set("told", b"")
    return f"told, dead: {caught.value.ranks}"


def test_abort_wakes_this_rank_with_its_cause_and_tells_the_others() -> None:
    assert [o.value for o in run_processes(2, abort_while_waiting)] == ["aborted", "told, dead: ()"]


def leave_in_good_order(worker) -> float:
    """Ranks 1 and 2 are done and gone before rank 0 has read their parts: that is no loss."""
    group = worker.group(backend="auto", timeout=TIMEOUT)
    group.barrier()
    store = worker.store()
    tensor = torch.full((1000,), float(worker.rank))
    if worker.rank == 0:
        store.wait(["gone/1", "gone/2"], 60.0)
        group.reduce(tensor, dst=0)
        with pytest.raises(PeerLost):
            group.barrier()
        return tensor[0].item()
    group.reduce(tensor, dst=0)
    if worker.rank == 1:
        group.close()
    store.set(f"gone/{worker.rank}", b"")
    return 0.0


def test_a_rank_that_gave_its_part_and_left_is_no_loss_to_that_collective() -> None:
    assert run_processes(3, leave_in_good_order)[0].value == 3.0


def call_something_else(worker, case: str) -> str:
    group = worker.group(backend="auto", timeout=TIMEOUT)
    zero = worker.rank == 0

    def call() -> None:
        if case == "kind":
            group.all_reduce(torch.ones(2)) if zero else group.barrier()
        elif case == "size":
            group.all_reduce(torch.ones(2 if zero else 3))
        elif case == "all_to_all":
            inputs = [torch.ones(2 if zero else 3)] * 2
            group._transport.all_to_all([torch.ones(2)] * 2, inputs, async_op=False)
        elif case == "recv":
            group.send(torch.ones(2), 1) if zero else group.recv(torch.ones(3), 0)
        elif case == "root":
            group.broadcast(torch.ones(1), src=worker.rank)
        group.barrier()

    with pytest.raises((CollectiveMismatch, PeerLost)) as caught:
        call()
    return type(caught.value).__name__


@pytest.mark.parametrize("case", ["kind", "size", "all_to_all", "recv", "root"])
def test_ranks_that_disagree_are_told(case: str) -> None:
    assert "CollectiveMismatch" in [o.value for o in run_processes(2, call_something_else, case)]
