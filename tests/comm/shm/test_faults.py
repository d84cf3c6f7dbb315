"""Ranks that die, stop, leave or disagree, with real processes: the others get the right error, and go on."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

import pytest
import torch

from phalanx.comm.transports.shm import _engine
from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.errors import CollectiveMismatch, GroupAborted, PeerLost, PeerTimeout
from processes import run_processes

TIMEOUT = 60.0
"""Of the groups here: a fault that was noticed by nothing else would be ``PeerTimeout``, not ``PeerLost``."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loss_of(call) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        call()
    return caught.value


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
        "recv_any": lambda: group.recv_any(torch.ones(1)),
        "gather": lambda: group.gather(torch.ones(1), [torch.ones(1)] * 3 if worker.rank == 0 else None, 0),
        "broadcast": lambda: group.broadcast(large, src=1),
    }[doing]
    error = loss_of(call)
    assert loss_of(lambda: group.all_reduce(torch.ones(1))) is error, "every later call raises the same"
    group.close()
    assert group.dead_ranks() == (1,), "which can be asked when it is over, too"
    rank = {0: 0, 2: 1}[worker.rank]
    regrouped = worker.group(backend="auto", timeout=TIMEOUT, generation=1, rank=rank, size=2)
    regrouped.all_reduce(shared.fill_(1.0))
    assert shared.eq(2.0).all(), "shared memory outlives the group it was made for"
    assert regrouped.dead_ranks() == ()
    regrouped.close()
    return error.ranks


@pytest.mark.parametrize("doing", ["before", "halfway", "shared", "async", "recv", "recv_any", "gather", "broadcast"])
def test_a_killed_rank_is_lost_and_the_rest_regroups(doing: str) -> None:
    outcomes = run_processes(3, survive_a_death, doing)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert [outcomes[r].value for r in (0, 2)] == [(1,), (1,)]


def be_rung_by_a_death(worker) -> bool:
    """Rank 1 dies when rank 0 sleeps, for far longer than the test lasts: only a ring can wake it."""
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
    return loss_of(lambda: group.recv(torch.ones(1), src=1)).ranks == (1,)


def test_a_death_wakes_who_sleeps_long() -> None:
    assert [o.value for o in run_processes(2, be_rung_by_a_death)] == [True, None]


def meet_a_stopped_rank(worker) -> tuple[str, tuple[int, ...]] | None:
    group = worker.group(backend="auto", timeout=TIMEOUT)
    pids = group.all_gather_values(os.getpid())
    store = worker.store()
    if worker.rank == 1:
        store.set("stopping", b"")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    store.wait(["stopping"], 60.0)
    group._transport._engine.timeout = 8.0  # from here on: forming the group may take as long as it takes
    with pytest.raises((PeerTimeout, PeerLost)) as caught:
        group.all_reduce(torch.ones(1 << 18))
    store.set(f"noticed/{worker.rank}", b"")
    store.wait(["noticed/0", "noticed/2"], 60.0)
    if worker.rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    return type(caught.value).__name__, caught.value.ranks


def test_a_stopped_rank_times_out() -> None:
    outcomes = run_processes(3, meet_a_stopped_rank)
    assert outcomes[1].exit_code == -signal.SIGKILL
    found = [outcomes[r].value for r in (0, 2)]
    assert "PeerTimeout" in [kind for kind, _ in found], found
    assert all(ranks == (1,) for kind, ranks in found if kind == "PeerTimeout"), found


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
    with pytest.raises(PeerLost, match="rank 0 left the group") as caught:
        group.recv(torch.empty(1), src=0)
    worker.store().set("told", b"")
    return f"told, dead: {caught.value.ranks}"


def test_abort_wakes_this_rank_with_its_cause_and_tells_the_others() -> None:
    assert [o.value for o in run_processes(2, abort_while_waiting)] == ["aborted", "told, dead: ()"]


def leave_in_good_order(worker) -> float:
    """Ranks 1 and 2 are done and gone before rank 0 has read their parts: that is no loss."""
    group = worker.group(backend="auto", timeout=TIMEOUT)
    pids = group.all_gather_values(os.getpid())
    store = worker.store()
    tensor = torch.full((1000,), float(worker.rank))
    if worker.rank == 0:
        store.wait(["gone/1", "gone/2"], 60.0)
        wait_for_the_end_of(pids[2])
        group.reduce(tensor, dst=0)
        with pytest.raises(PeerLost):
            group.barrier()
        return tensor[0].item()
    group.reduce(tensor, dst=0)
    if worker.rank == 1:
        group.close()
    store.set(f"gone/{worker.rank}", b"")
    if worker.rank == 2:
        os._exit(0)  # without closing, as a script that ends does
    return 0.0


def wait_for_the_end_of(pid: int) -> None:
    """Of a process that may be somebody else's child, and may have been waited for already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([process], [], [], 60.0)[0], f"process {pid} did not end"
    os.close(process)


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


def receive_from_who_is_left(worker) -> tuple[list[int], str]:
    """Rank 1 sends and leaves in good order, then rank 2 sends; then nobody can any more."""
    group = worker.group(backend="auto", timeout=TIMEOUT)
    sources: list[int] = []
    group.barrier()
    if worker.rank == 0:
        group.recv_any(torch.empty(1), arrived=sources.append)
        group.recv_any(torch.empty(1), arrived=sources.append)
        return sources, str(loss_of(lambda: group.recv_any(torch.empty(1))))
    if worker.rank == 2:
        index = group._transport._window._blocks[1] + L.STATE
        while group._transport._engine.words[index] != L.CLOSED:
            time.sleep(0.01)
        time.sleep(0.1)  # rank 0 looks around every few milliseconds while it waits
    group.send(torch.ones(1), 0)
    group.close()
    return sources, ""


def test_who_may_receive_from_any_rank_waits_for_those_that_are_left() -> None:
    sources, message = run_processes(3, receive_from_who_is_left)[0].value
    assert sources == [1, 2]
    assert "rank 1, 2 left the group" in message


def receive_beside_a_receive(worker) -> list[float]:
    """Rank 0 awaits two messages with one tag: what comes first is for the receive from rank 1 that was there first."""
    group = worker.group(backend="auto", timeout=TIMEOUT)
    first, second = torch.zeros(1), torch.zeros(1)
    group.barrier()
    if worker.rank == 0:
        work = group.recv(first, 1, tag=8, async_op=True)
        group.recv_any(second, tag=8)
        work.wait()
    else:
        asleep = group._transport._window._blocks[0] + L.ASLEEP
        for value in (1.0, 2.0):  # each when rank 0 has looked around in vain, and sleeps
            while not group._transport._engine.words[asleep]:
                time.sleep(0.01)
            group.send(torch.full((1,), value), 0, tag=8)
    group.barrier()
    return [first.item(), second.item()]


def test_receiving_from_any_rank_waits_for_another_receive_of_this_rank() -> None:
    assert run_processes(2, receive_beside_a_receive)[0].value == [1.0, 2.0]


def miss_a_monitored_barrier(worker) -> tuple[tuple[int, ...], str] | None:
    group = worker.group(backend="auto", timeout=TIMEOUT)
    group.monitored_barrier()
    if worker.rank in (1, 3):
        loss_of(group.barrier)  # they do something else meanwhile
        return None
    with pytest.raises(PeerTimeout) as caught:
        group.monitored_barrier(timeout=0.3)
    return caught.value.ranks, str(caught.value)


def test_a_monitored_barrier_names_all_that_did_not_come() -> None:
    outcomes = [outcome.value for outcome in run_processes(4, miss_a_monitored_barrier)]
    assert outcomes[1] is outcomes[3] is None
    for rank in (0, 2):
        missing, message = outcomes[rank]
        assert missing == (1, 3)
        assert f"rank {rank}: ranks [1, 3] of 4 did not reach the monitored barrier within 0.3 s" in message
