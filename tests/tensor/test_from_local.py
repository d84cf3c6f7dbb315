"""``from_local``: all ranks agree about parts that do not fit, replicas become the first rank's to the bit, and what
is no part of a DTensor is refused.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from meshes import on_mesh

from phalanx import comm
from phalanx.comm import DeviceMesh
from phalanx.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_module,
    distribute_tensor,
    zeros,
)

pytestmark = pytest.mark.fast


def outcomes(shapes: Any, mesh_shape: tuple[int, ...], placements: Any, **options: Any) -> list[Any]:
    """The global shape that each rank gets, or "refused"."""

    def body(mesh: Any) -> Any:
        try:
            x = DTensor.from_local(torch.ones(shapes[mesh.get_rank()]), mesh, placements, **options)
        except ValueError:
            return "refused"
        return tuple(x.shape)

    return on_mesh(body, *mesh_shape, timeout=30.0)


def test_misfits_on_two_axes_raise_on_every_rank() -> None:
    assert outcomes([(1,), (3,), (2,), (1,)], (2, 2), [Shard(0), Shard(0)]) == ["refused"] * 4
    assert outcomes([(2, 2), (2, 2), (1, 2), (2, 2)], (2, 2), [Shard(0), Shard(1)]) == ["refused"] * 4


CUTS = [
    ((2, 2), [StridedShard(0, 2), Shard(0)]),
    ((2, 2), [Shard(0), StridedShard(0, 2)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((4,), [StridedShard(0, 2)]),
    ((2, 2, 2), [Shard(0), Shard(1), Shard(0)]),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), CUTS, ids=str)
def test_ranks_agree_about_any_sizes(mesh_shape: Any, placements: Any) -> None:
    rng = random.Random(str((mesh_shape, placements)))
    num_ranks = torch.Size(mesh_shape).numel()
    for _ in range(6):
        found = outcomes([(rng.randrange(4), 3) for _ in range(num_ranks)], mesh_shape, placements)
        assert len(set(found)) == 1, found


@pytest.mark.parametrize(("mesh_shape", "placements"), CUTS, ids=str)
def test_parts_that_were_cut_fit(mesh_shape: Any, placements: Any) -> None:
    def body(mesh: Any) -> None:
        for rows, run_check in itertools.product((0, 1, 5, 8, 13), (False, True)):
            x = distribute_tensor(torch.arange(rows * 6.0).view(rows, 6), mesh, placements, src_data_rank=None)
            again = DTensor.from_local(x.to_local(), mesh, placements, run_check=run_check)
            assert again.shape == x.shape
            assert torch.equal(again.full_tensor(), x.full_tensor())

    on_mesh(body, *mesh_shape)


@pytest.mark.parametrize(
    ("placements", "shapes"),
    [
        ([Replicate(), Shard(0)], [(2,), (2,), (3,), (3,)]),
        ([Replicate(), Shard(0)], [(2,), (2,), (1,), (3,)]),
        ([Replicate(), Replicate()], [(2,), (2,), (2,), (3,)]),
        ([Partial(), Replicate()], [(2,), (2,), (3,), (3,)]),
        ([Shard(0), Partial()], [(2,), (3,), (2,), (3,)]),
    ],
    ids=str,
)
def test_run_check_finds_replicas_of_other_shapes(placements: Any, shapes: Any) -> None:
    assert outcomes(shapes, (2, 2), placements, run_check=True) == ["refused"] * 4
    fits = (4,) if any(p.is_shard() for p in placements) else (2,)
    assert outcomes([(2,)] * 4, (2, 2), placements, run_check=True) == [fits] * 4


def test_run_check_looks_at_parts_of_a_given_shape() -> None:
    assert outcomes([(2,), (3,)], (2,), [Shard(0)], shape=(4,), run_check=True) == ["refused"] * 2
    assert outcomes([(2,), (2,)], (2,), [Shard(0)], shape=(4,), run_check=True) == [(4,)] * 2


def test_distribute_tensor_of_other_shapes_raises_on_every_rank() -> None:
    def body(mesh: Any) -> None:
        with pytest.raises(ValueError, match="expected the same shape and dtype"):
            distribute_tensor(torch.ones(4 + (mesh.get_rank() == 3)), mesh, [Shard(0), Replicate()])

    on_mesh(body, 2, 2)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_replicas_become_those_of_the_first_rank_to_the_bit(mesh_shape: Any) -> None:
    values = torch.tensor([0.1, -0.0, 1e-30, float("inf"), float("nan")])

    def body(mesh: Any) -> None:
        first = mesh.get_rank() == 0
        local = (values if first else torch.full((5,), 1e8)).clone().requires_grad_()
        x = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=True)
        assert torch.equal(x.to_local().detach().view(torch.int32), values.view(torch.int32))
        (x * torch.tensor(3.0)).sum().backward()
        assert local.grad is not None
        assert local.grad.tolist() == [3.0] * 5

    on_mesh(body, *mesh_shape)


def test_the_gradient_of_a_checked_replica_is_itself_differentiated() -> None:
    def body(mesh: Any) -> None:
        local = torch.full((3,), 2.0 + mesh.get_rank(), requires_grad=True)
        x = DTensor.from_local(local, mesh, [Replicate()], run_check=True)
        (grad,) = torch.autograd.grad((x**3).sum(), local, create_graph=True)
        assert grad.tolist() == [12.0] * 3
        (again,) = torch.autograd.grad(grad.sum(), local)
        assert again.tolist() == [12.0] * 3

    on_mesh(body, 2)


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(4).to_sparse()

    def body(mesh: Any) -> None:
        for make in (distribute_tensor, DTensor.from_local):
            with pytest.raises(ValueError, match=r"takes a dense tensor, got one of shape \(4, 4\).*to_dense"):
                make(sparse, mesh, [Shard(0)])

    on_mesh(body, 2)


def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    def rank_main(group: Any) -> Any:
        mesh = DeviceMesh("cpu", [0, 1])
        if group.rank < 2:
            x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            y = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            return (x + y).full_tensor().tolist()
        makers: list[Any] = [
            lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
            lambda: DTensor.from_local(torch.ones(4), mesh, [Shard(0)]),
            lambda: zeros(4, device_mesh=mesh, placements=[Shard(0)]),
            lambda: distribute_module(torch.nn.Linear(2, 2), mesh),
        ]
        for make in makers:
            with pytest.raises(ValueError, match=r"rank 2 is not part of .*on the ranks of the mesh only"):
                make()
        return None

    assert comm.simulate(3).run(rank_main) == [[1.0, 2.0, 3.0, 4.0]] * 2 + [None]
