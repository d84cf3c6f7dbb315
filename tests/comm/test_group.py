"""Groups beyond the collectives: wrapping, torch's default group, observers, mismatched calls, current group."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import CommEvent, Group, current_group, init, observe, simulate, use_group
from phalanx.comm.group._observe import tally_bytes
from phalanx.comm.stores import MemoryStore
from phalanx.errors import CollectiveMismatch, PeerTimeout, RankFailed
from processes import run_processes


def wrap_what_the_user_made(worker):
    store = worker.store().as_c10d()  # torch does not keep a store written in Python alive
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.size)
    group = Group.wrap(dist.group.WORLD)
    assert (group.rank, group.size, group.backend) == (worker.rank, 3, "gloo")
    tensor = torch.ones(2)
    group.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 3.0]
    assert current_group() is current_group(), "torch's default group is wrapped once"
    part = group.subgroup([0, 2])
    if part is not None:
        part.all_reduce(tensor)
        assert tensor.tolist() == [6.0, 6.0]
    half = Group.wrap(dist.new_group([1, 2])) if worker.rank else dist.new_group([1, 2])
    if worker.rank:
        assert half.ranks == (1, 2)
        half.barrier()
    group.close()
    dist.barrier()  # closing the wrapper leaves the user's group alone
    return True


def test_wraps_a_process_group_that_the_user_made() -> None:
    assert all(outcome.value for outcome in run_processes(3, wrap_what_the_user_made))


def become_default(worker):
    for generation in range(2):
        group = worker.group(generation=generation)
        group.make_default()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == worker.size
        with pytest.raises(RuntimeError, match="default process group already"):
            group.make_default()
        group.abort() if generation == 0 else group.close()
        assert not dist.is_initialized()
    return True


def test_becomes_torchs_default_group_and_gives_it_back() -> None:
    assert all(outcome.value for outcome in run_processes(2, become_default))


def init_from_environment(worker):
    os.environ.update(
        RANK=str(worker.rank),
        WORLD_SIZE=str(worker.size),
        PHALANX_STORE=worker.store_url,
        TORCHELASTIC_RUN_ID="some-job",
        PHALANX_GENERATION="4",
    )
    group = init(timeout=60)
    assert current_group() is group
    assert (group.job, group.generation) == ("some-job", 4)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_init_joins_what_the_environment_says() -> None:
    assert [outcome.value for outcome in run_processes(2, init_from_environment)] == [2.0, 2.0]


def init_alone(worker):
    group = init()
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return group.size, tensor.item(), dist.get_world_size()


def test_a_process_started_by_hand_is_a_world_of_one() -> None:
    assert run_processes(1, init_alone)[0].value == (1, 1.0, 1)


def mismatch(worker, kind: str):
    os.environ["PHALANX_DEBUG"] = "collectives"
    group = worker.group()
    group.all_reduce(torch.ones(2))
    half = group.subgroup([0, 1])
    half.barrier()
    if kind == "missing":
        group._checker._timeout = 1.0  # only now: forming the group and meeting may take as long as it takes
        if worker.rank == 1:
            worker.store().wait(["seen"], timeout=60)
            return ""
    calls = {
        "other call": [lambda: group.all_reduce(torch.ones(2)), lambda: group.broadcast(torch.ones(2), 0)],
        "other shape": [lambda: group.all_reduce(torch.ones(2)), lambda: group.all_reduce(torch.ones(3))],
        "missing": [lambda: group.all_reduce(torch.ones(2)), lambda: None],
    }
    with pytest.raises((CollectiveMismatch, PeerTimeout)) as caught:
        calls[kind][worker.rank]()
    worker.store().set("seen", b"1")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("other call", ["rank 0: all_reduce(float32, [2], sum)", "rank 1: broadcast(float32, [2], root 0)"]),
        ("other shape", ["rank 0: all_reduce(float32, [2], sum)", "rank 1: all_reduce(float32, [3], sum)"]),
        ("missing", ["was not called by ranks [1] within 1 s", "rank 0: all_reduce(float32, [2], sum)"]),
    ],
)
def test_debug_mode_says_which_rank_called_what(kind: str, expected: list[str]) -> None:
    outcomes = run_processes(2, mismatch, kind)
    for outcome in outcomes if kind != "missing" else outcomes[:1]:
        assert all(text in outcome.value for text in expected), outcome.value


@pytest.mark.fast
def test_observers_see_every_collective_once_with_bytes_and_line() -> None:
    def main(group: Group):
        events, lines = [], []
        with observe(events.append), observe(lambda event: lines.append(event.caller())):
            group.all_reduce(torch.ones(8))
            group.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
            group.reduce_scatter_tensor(torch.ones(1), torch.ones(2))
            group.barrier()
        group.barrier()  # outside of the block: not seen
        assert all(event.group is group for event in events), "a rank sees its own events only"
        return [(event.name, event.nbytes, event.op) for event in events], lines

    for events, lines in simulate(2).run(main):
        assert events == [
            ("all_reduce", 32, "sum"),
            ("all_gather", 16, ""),
            ("reduce_scatter_tensor", 8, "sum"),
            ("barrier", 0, ""),
        ]
        assert all(line.startswith(f"{__file__}:") for line in lines)


@pytest.mark.fast
def test_a_tally_counts_what_an_observer_would() -> None:
    def run(group: Group) -> tuple[dict[str, int], dict[str, int]]:
        seen: dict[str, int] = {}
        tally: dict[str, int] = {}

        def note(event: CommEvent) -> None:
            seen[event.name] = seen.get(event.name, 0) + event.nbytes

        with observe(note), tally_bytes(tally):
            for _ in range(2):
                group.all_reduce(torch.zeros(3))
            group.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(2))
            group.barrier()
        group.all_reduce(torch.zeros(3))
        return seen, tally

    for seen, tally in simulate(2).run(run):
        assert tally == seen == {"all_reduce": 24, "all_gather": 16, "barrier": 0}


@pytest.mark.fast
def test_what_an_observer_raises_reaches_the_caller_and_it_is_removed() -> None:
    def main(group: Group):
        def refuse(event) -> None:
            raise ValueError(f"no {event.name} here")

        with pytest.raises(ValueError, match="no barrier here"), observe(refuse):
            group.barrier()
        group.barrier()
        return True

    assert simulate(2).run(main) == [True, True]


@pytest.mark.fast
def test_use_group_is_per_simulated_rank_and_restores() -> None:
    def main(group: Group):
        assert current_group() is group
        part = group.subgroup([group.rank])
        with pytest.raises(ZeroDivisionError), use_group(part):  # noqa: PT012  # the block is what is tested
            assert current_group() is part
            _ = 1 // 0
        return current_group() is group

    assert simulate(3).run(main) == [True] * 3
    with pytest.raises(RuntimeError, match=r"call phalanx.init\(\)"):
        current_group()


@pytest.mark.fast
@pytest.mark.parametrize("backend", ["shm", "gluu"])
def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(backend: str) -> None:
    """Shared memory has no name of its own among them: ``auto`` chooses it."""
    expected = f"backend '{backend}'; expected one of auto, gloo, nccl"
    with pytest.raises(ValueError, match=expected):
        Group.create(MemoryStore(), 0, 1, backend=backend)


@pytest.mark.fast
def test_simulated_groups_cannot_become_torchs_default() -> None:
    with pytest.raises(RankFailed, match=r"only groups from Group\.create"):
        simulate(1).run(lambda group: group.make_default())
