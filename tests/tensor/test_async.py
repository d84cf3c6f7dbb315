"""``redistribute(async_op=True)``: returns while the collective is under way, and is complete when first used."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from meshes import Twice, on_mesh

from phalanx import comm
from phalanx.comm import DeviceMesh, Group, init_device_mesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast

WHOLE = torch.arange(20.0).reshape(5, 4)
MOVES = [
    ([Shard(0)], [Replicate()]),
    ([Shard(0)], [Shard(1)]),
    ([Partial()], [Replicate()]),
    ([Partial()], [Shard(0)]),
    ([Partial("avg")], [Replicate()]),
    ([Replicate()], [Shard(1)]),  # sends nothing: complete at once
]


def laid_out(mesh: Any, placements: Any) -> DTensor:
    if placements[0].is_partial():
        share = 1.0 if placements[0].is_partial("avg") else 1 / mesh.size()
        local = WHOLE * share
        return DTensor.from_local(local, mesh, placements, shape=WHOLE.shape).detach()
    return distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
def test_equals_the_synchronous_move_forward_and_backward(before: Any, after: Any) -> None:
    def rank_main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (3,))
        results = []
        for async_op in (False, True):
            x = laid_out(mesh, before).requires_grad_()
            y = x.redistribute(placements=after, async_op=async_op)
            assert y.placements == tuple(after)
            assert y.shape == WHOLE.shape
            with torch.no_grad():  # who looks first must not decide whether there is a gradient
                torch.testing.assert_close(y.full_tensor(), WHOLE)
            assert type(y) is DTensor
            (y * y).sum().backward()
            assert x.grad is not None
            results.append((y.to_local().detach(), x.grad.to_local()))
        for ours, reference in zip(*results, strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=0)

    comm.simulate(3).run(rank_main)


def test_returns_before_the_other_rank_has_come() -> None:
    """Rank 1 joins the collective only after rank 0 has got its result back."""
    returned = threading.Event()

    class Late(Exception):
        pass

    def rank_main(rank: int, results: dict[int, Any]) -> None:
        try:
            group = Group.create(store, rank, 2, backend="gloo", timeout=60)
            with group:  # by name: the current group is the process's, which two threads would share
                mesh = DeviceMesh.from_group(group, "cpu")
                x = distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None)
                if rank == 1 and not returned.wait(60):
                    raise Late("rank 0 was not given its result while the collective was under way")
                y = x.redistribute(placements=[Replicate()], async_op=True)
                assert type(y) is not DTensor, "the data was waited for"
                returned.set()
                results[rank] = (y + y).to_local()  # the first use waits
        except BaseException as error:
            returned.set()
            results[rank] = error

    store = comm.stores.MemoryStore()
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=rank_main, args=(rank, results)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for rank in range(2):
        assert isinstance(results[rank], torch.Tensor), results[rank]
        torch.testing.assert_close(results[rank], WHOLE * 2)


def test_every_way_of_looking_completes_it() -> None:
    looks = {
        "operator on the left": lambda y: (y + y).full_tensor() / 2,
        "function": lambda y: torch.relu(y).full_tensor(),
        "inside a list": lambda y: torch.cat([y, y]).full_tensor()[: len(WHOLE)],
        "to_local": lambda y: y.to_local(),
        "redistribute": lambda y: y.redistribute(placements=[Shard(0)]).full_tensor(),
        "detach": lambda y: y.detach().full_tensor(),
        "indexing": lambda y: y[:].full_tensor(),
        "in place": lambda y: y.mul_(1).full_tensor(),
    }

    def rank_main(group: Group) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for name, look in looks.items():
            x = distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None)
            y = x.redistribute(placements=[Replicate()], async_op=True)
            torch.testing.assert_close(look(y), WHOLE, msg=name)

    comm.simulate(2).run(rank_main)


def test_a_result_that_nobody_uses_harms_nothing() -> None:
    def rank_main(group: Group) -> float:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(WHOLE, mesh, [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Replicate()], async_op=True)
        return float(x.sum().full_tensor())

    assert comm.simulate(2).run(rank_main) == [float(WHOLE.sum())] * 2


def test_a_users_function_keeps_the_gradient_of_what_is_on_its_way() -> None:
    def rank_main(group: Group) -> None:
        x = laid_out(init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        y = Twice.apply(x.redistribute(placements=[Replicate()], async_op=True))
        (y * y).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), 8 * WHOLE)

    comm.simulate(2).run(rank_main)


@pytest.mark.parametrize("before", [Shard(0), Partial(), Partial("avg")], ids=str)
@pytest.mark.parametrize("after", [Replicate(), Shard(1)], ids=str)
def test_what_is_written_to_the_tensor_meanwhile_is_not_sent(before: Any, after: Any) -> None:
    def body(mesh: Any) -> None:
        local = torch.arange(15.0).reshape(5, 3)
        x = DTensor.from_local(
            local[: 3 if mesh.get_rank() == 0 else 2].clone() if before == Shard(0) else local, mesh, [before]
        )
        expected = x.full_tensor().clone()
        moved = x.redistribute(placements=[after], async_op=True)
        x.zero_()
        torch.testing.assert_close(moved.full_tensor(), expected)

    on_mesh(body, 2)
