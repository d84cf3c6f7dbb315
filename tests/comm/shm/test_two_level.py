"""Groups over several hosts: real processes that believe they are on two or three of them."""

from __future__ import annotations

import hashlib
import logging
import os
import signal

import pytest
import torch

from comm.test_collectives import CASES, WORLD
from phalanx.comm.failure import _liveness
from phalanx.comm.failure._liveness import Identity
from phalanx.comm.transports._auto import choose
from phalanx.comm.transports._two_level import PAYS_UP_TO
from phalanx.comm.transports.shm import _segment_join
from phalanx.errors import PeerLost
from processes import run_processes


def identity(machine: str, pid: int = 1, uid: int = 0) -> Identity:
    return Identity(machine=machine, host=machine, pid=pid, started=0, uid=uid)


@pytest.mark.fast
def test_the_choice_follows_from_where_the_ranks_are() -> None:
    assert choose({0: identity("a"), 1: identity("a")}).kind == "shm"
    assert choose({0: identity("a"), 1: identity("b")}).kind == "gloo"
    assert choose({0: identity("a"), 1: identity("b"), 2: identity("a")}).kind == "two_level"
    assert choose({0: identity("a"), 1: identity("a", uid=7)}).kind == "gloo", "another user shares no memory"
    assert "2 hosts have 2, 1 ranks" in choose({0: identity("a"), 1: identity("b"), 2: identity("a")}).why


def pretend(rank: int, hosts: list[str]) -> None:
    _liveness._machine = lambda: hosts[rank]


def run_all_cases(worker, hosts: list[str]) -> str:
    pretend(worker.rank, hosts)
    group = worker.group(backend="auto")
    for case in CASES:
        case(group)
        group.barrier()
    return group.backend


@pytest.mark.parametrize("hosts", [["a", "a", "b"], ["b", "a", "b"]], ids=["in order", "interleaved"])
def test_every_case_of_the_suite_passes(hosts: list[str]) -> None:
    assert [o.value for o in run_processes(WORLD, run_all_cases, hosts)] == ["two_level"] * WORLD


def count_levels(worker, hosts: list[str], kind: str, nbytes: int) -> tuple[int, str]:
    """How often a collective of this size used shared memory, and its result's bits."""
    pretend(worker.rank, hosts)
    group = worker.group(backend="auto", timeout=60.0)
    local = group._transport._local._engine
    runs = []
    run = local.run
    local.run = lambda lane, steps: (runs.append(kind), run(lane, steps))
    part = nbytes // 4 // group.size
    generator = torch.Generator().manual_seed(worker.rank)
    own = torch.randn(part, generator=generator)
    whole = torch.randn(part * group.size, generator=generator)
    if kind == "all_reduce":
        group.all_reduce(whole)
    elif kind == "broadcast":
        group.broadcast(whole, src=1)
    elif kind == "all_gather":
        group.all_gather_into_tensor(whole, own)
    else:
        group.reduce_scatter_tensor(own, whole)
        group.all_gather_into_tensor(whole := torch.empty_like(whole), own)
    bits = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    group.barrier()
    return len(runs), bits


@pytest.mark.parametrize("kind", sorted(PAYS_UP_TO))
@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_two_levels_where_the_table_says_so_and_the_same_bits_on_all_ranks(hosts: str, kind: str) -> None:
    limit = PAYS_UP_TO[kind][hosts == "aab"]
    for nbytes in (48 * 1024, 3 * 1024 * 1024):
        outcomes = [o.value for o in run_processes(len(hosts), count_levels, list(hosts), kind, nbytes)]
        assert len({bits for _, bits in outcomes}) == 1, "ranks differ"
        assert all((count > 0) == (nbytes <= limit) for count, _ in outcomes), (kind, nbytes, outcomes)


def do_without_on_one_host(worker) -> tuple[str, float, list[str]]:
    pretend(worker.rank, ["a", "a", "b", "b"])
    if worker.rank == 3:

        def fail(*_: object) -> int:
            raise OSError(1, "Operation not permitted")

        _segment_join.open_file_of = fail
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda item: lines.append(item.getMessage())
    logging.getLogger("phalanx.comm").addHandler(handler)
    logging.getLogger("phalanx.comm").setLevel(logging.INFO)
    group = worker.group(backend="auto", timeout=60.0)
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    group.barrier()
    return group.backend, tensor[0].item(), lines


def test_one_host_without_shared_memory_makes_all_use_gloo() -> None:
    outcomes = run_processes(4, do_without_on_one_host)
    assert [outcome.value[:2] for outcome in outcomes] == [("gloo", 4.0)] * 4
    (line,), *others = (outcome.value[2] for outcome in outcomes)
    assert "gloo, since a host has no shared memory" in line
    assert others == [[]] * 3, "one rank speaks for all"


def lose_a_rank_of_another_host(worker) -> bool:
    pretend(worker.rank, ["a", "a", "b", "b"])
    group = worker.group(backend="auto", timeout=60.0)
    tensor = torch.ones(1000)
    group.all_reduce(tensor)
    assert tensor.eq(4).all()
    if worker.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce_for_ever() -> None:
        while True:
            group.all_reduce(tensor)

    with pytest.raises(PeerLost):
        reduce_for_ever()
    group.close()
    return True


def test_a_death_reaches_every_host() -> None:
    outcomes = run_processes(4, lose_a_rank_of_another_host)
    assert [o.value for o in outcomes] == [True, True, True, None]
