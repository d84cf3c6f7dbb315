"""Real processes, real kills: what survivors get, and how they go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from phalanx.comm.failure._liveness import own_identity
from phalanx.comm.faults import kill_at, play
from phalanx.comm.stores import MemoryStore
from phalanx.comm.stores._for_torch import exchange_for_torch
from phalanx.comm.transports import _creation
from phalanx.comm.transports._interface import GroupSpec
from phalanx.errors import GroupAborted, PeerLost, PeerTimeout
from processes import run_processes


def reduce_until_fault(group) -> BaseException:
    tensor = torch.ones(1000)
    while True:
        try:
            group.all_reduce(tensor, "max")
        except (PeerLost, PeerTimeout) as error:
            return error


def die_then_regroup(worker, victim: int, step: int):
    group = worker.group(timeout=60.0)
    with play(kill_at(rank=victim, step=step)):
        error = reduce_until_fault(group)
    assert isinstance(error, PeerLost), error
    assert error.generation == 0
    assert error.ranks in ((victim,), ()), error
    group.abort()
    survivors = [rank for rank in range(worker.size) if rank != victim]
    following = worker.group(rank=survivors.index(worker.rank), size=len(survivors), generation=1)
    tensor = torch.tensor([1.0])
    for _ in range(3):
        following.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_of_a_kill_regroup_and_go_on(victim: int) -> None:
    outcomes = run_processes(5, die_then_regroup, victim, 10)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    assert [o.value for o in outcomes if o.rank != victim] == [64.0] * 4


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_any_of_five_killed_twenty_times_in_a_row() -> None:
    for round_number in range(20):
        victim = round_number % 5
        outcomes = run_processes(5, die_then_regroup, victim, 3 + 7 * round_number)
        assert [o.value for o in outcomes if o.rank != victim] == [64.0] * 4


def wait_on_a_live_neighbour(worker):
    """Rank 2 dies while idle; rank 1 only ever waits for rank 0, which waits for rank 2."""
    group, store = worker.group(timeout=60.0), worker.store()
    group.barrier()
    if worker.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        group.recv(torch.zeros(1), src=2 if worker.rank == 0 else 0)
    store.set(f"learnt/{worker.rank}", b"1")
    store.wait(["learnt/0", "learnt/1"], timeout=60)  # nobody else leaves before both know
    return caught.value.ranks


def test_one_who_waits_for_a_live_neighbour_learns_too() -> None:
    outcomes = run_processes(3, wait_on_a_live_neighbour)
    assert outcomes[0].value == (2,)
    assert outcomes[1].value in ((2,), ())


def idle_then_call(worker):
    group = worker.group(timeout=60.0)
    group.barrier()
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while group._transport._dead_since is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+"):
        group.broadcast(torch.zeros(1), src=0)
    with pytest.raises(PeerLost, match="rank 1"):
        group.barrier()  # every later call says the same
    return True


def test_the_next_call_after_a_death_raises() -> None:
    outcomes = run_processes(3, idle_then_call)
    assert [outcomes[0].value, outcomes[2].value] == [True, True]


def set_timeout(group, seconds: float) -> None:
    transport = group._transport
    transport._engine._set_default_timeout(timedelta(seconds=seconds))
    transport._timeout = transport._failures._timeout = seconds


def hang_one(worker):
    group = worker.group(timeout=60.0)
    pids = group.all_gather_values(os.getpid())
    set_timeout(group, 8.0)  # only now: forming the group may take as long as it takes
    if worker.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    error = reduce_until_fault(group)
    group.abort()
    following = worker.group(rank=worker.rank, size=2, generation=1)
    following.barrier()
    if worker.rank == 0:
        os.kill(pids[2], signal.SIGKILL)
    return type(error).__name__, error.ranks


def test_a_stopped_peer_gives_peer_timeout_on_every_survivor() -> None:
    outcomes = run_processes(3, hang_one)
    assert outcomes[0].value == ("PeerTimeout", (2,))
    assert outcomes[1].value == ("PeerTimeout", (2,))


def wait_while_the_peer_is_away(worker, backend: str, call: str) -> float:
    group, store = worker.group(backend=backend, timeout=60.0), worker.store()
    group.barrier()
    tensor = torch.tensor([worker.rank + 1.0])

    def start():
        if call == "all_reduce":
            return group.all_reduce(tensor, async_op=True)
        return (group.recv if worker.rank == 0 else group.send)(tensor, 1 - worker.rank, async_op=True)

    if worker.rank == 0:
        work = start()
        with pytest.raises(PeerTimeout, match="did not take part"):
            work.wait(0.05)
        assert not work.is_done()
        store.set("left", b"")
    else:
        store.wait(["left"], timeout=60)
        work = start()
    work.wait(60.0)
    assert work.is_done()
    work.wait(0.0)  # done is done
    group.barrier()
    return tensor.item()


@pytest.mark.parametrize("backend", ["gloo", "auto"])
@pytest.mark.parametrize(("call", "expected"), [("all_reduce", 3.0), ("recv", 2.0)])
def test_a_wait_that_ran_out_gives_peer_timeout_and_may_be_repeated(backend: str, call: str, expected: float) -> None:
    outcomes = run_processes(2, wait_while_the_peer_is_away, backend, call)
    assert [(o.value, o.error) for o in outcomes] == [(expected, "")] * 2


def abort_from_another_thread(worker):
    group, store = worker.group(timeout=60.0), worker.store()
    group.barrier()
    if worker.rank == 0:
        waiting = threading.Event()
        caught: list[BaseException] = []

        def wait() -> None:
            work = group.all_reduce(torch.ones(1), async_op=True)
            waiting.set()
            try:
                work.wait()
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        group.abort(PeerLost("told so by the agent", generation=0))
        thread.join(30)
        assert not thread.is_alive()
        assert [str(error) for error in caught] == ["told so by the agent"]
        with pytest.raises(PeerLost, match="told so"):
            group.barrier()
        store.set("aborted", b"")
    else:
        store.wait(["aborted"], timeout=60)  # rank 0 would see an earlier end of this one as a loss
        group.abort()
        with pytest.raises(GroupAborted, match="aborted"):
            group.barrier()
    group = worker.group(generation=1)
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return tensor.item()


def test_abort_wakes_whoever_waits_and_the_next_generation_forms() -> None:
    assert [outcome.value for outcome in run_processes(2, abort_from_another_thread)] == [2.0, 2.0]


def a_peer_never_comes(worker):
    if worker.rank == 1:
        return None
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not join generation 0 of job 'test' within 0.5 s"):
        worker.group(timeout=0.5)
    with pytest.raises(PeerLost, match="enough"):
        worker.group(timeout=60, generation=1, interrupt=lambda: PeerLost("enough"))
    return True


def test_ranks_that_never_join_are_named() -> None:
    assert run_processes(2, a_peer_never_comes)[0].value is True


def die_while_forming(worker):
    store = worker.store()
    if worker.rank == 1:
        # The identity is written, then the process dies before it connects.
        from phalanx.comm.transports import _creation

        _creation.make_engine = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="while generation 0 formed"):
        worker.group(timeout=60)
    store.close()
    survivor = worker.group(rank=0, size=1, generation=1)
    survivor.barrier()
    return True


@pytest.mark.fast
def test_an_address_that_never_comes_while_the_group_forms_is_a_fault_of_a_peer() -> None:
    """Or that a stranger wrote over: whoever catches lost peers forms the next generation, and does not end."""
    spec = GroupSpec(store=MemoryStore(), rank=0, size=2, timeout=0.1, job="j", generation=7)
    exchange = exchange_for_torch(spec.store.as_c10d(), 0, 2, spec.timeout)

    def make() -> None:
        exchange.set("group/0", b"an address")
        exchange.multi_get(["group/0", "group/1"])

    peers = {0: own_identity(), 1: own_identity()}
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not say within 0.1 s how to be reached in gen") as caught:
        _creation._make_in_thread(spec, peers, lambda: None, make, exchange)
    assert (caught.value.generation, caught.value.ranks) == (7, (1,))


@pytest.mark.fast
def test_who_gives_a_group_up_while_it_forms_leaves_nobody_waiting_for_addresses() -> None:
    spec = GroupSpec(store=MemoryStore(), rank=1, size=2, timeout=600.0, job="j", generation=7)
    exchange = exchange_for_torch(spec.store.as_c10d(), 1, 2, spec.timeout)
    ended = threading.Event()

    def make() -> None:
        try:
            exchange.wait(["group/0"])
        finally:
            ended.set()

    peers = {0: own_identity(), 1: own_identity()}
    with pytest.raises(PeerLost, match="the agents say so"):
        _creation._make_in_thread(spec, peers, lambda: PeerLost("the agents say so"), make, exchange)
    assert ended.wait(60), "the thread waits on for a rank that will not come"


def test_a_death_while_the_group_forms_is_noticed() -> None:
    outcomes = run_processes(2, die_while_forming)
    assert outcomes[0].value is True


def stale_keys(worker):
    for generation in range(3):
        group = worker.group(generation=generation)
        tensor = torch.tensor([float(generation)])
        group.all_reduce(tensor)
        assert tensor.item() == generation * worker.size
        group.close()
    return True


def test_generations_on_one_store_do_not_see_each_other() -> None:
    assert all(outcome.value for outcome in run_processes(3, stale_keys))


def resources() -> tuple[int, int, int]:
    """Descriptors, threads, and KB of memory of its own: pages of libraries come and go as the machine needs room."""
    with open("/proc/self/status") as file:
        sizes = {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("RssAnon", "VmSwap"))}
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        int(sizes["RssAnon"]) + int(sizes["VmSwap"]),
    )


def wait_for_releases() -> None:
    deadline = time.monotonic() + 60
    names = ("phalanx-release", "phalanx-connect")
    while any(t.name in names for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


def regroup_often(worker, rounds: int, backend: str):
    store = worker.store()
    marks = []
    for generation in range(rounds):
        from phalanx.comm import Group

        group = Group.create(
            store, worker.rank, worker.size, job="test", generation=generation, backend=backend, timeout=30
        )
        tensor = torch.ones(100)
        group.all_reduce(tensor)
        assert tensor[0].item() == worker.size
        (group.abort if generation % 2 else group.close)()
        if generation in (19, rounds - 1):
            wait_for_releases()
            marks.append(resources())
    return marks


def check_no_growth(marks) -> None:
    early, late = marks
    assert late[0] <= early[0], f"file descriptors grew: {early[0]} -> {late[0]}"
    assert late[1] <= early[1], f"threads grew: {early[1]} -> {late[1]}"
    assert late[2] <= early[2] + 6_000, f"memory grew (KB): {early[2]} -> {late[2]}"


def test_regroups_leak_nothing() -> None:
    for outcome in run_processes(2, regroup_often, 200, "gloo"):
        check_no_growth(outcome.value)
