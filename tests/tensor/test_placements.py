"""Placements are values: compared, hashed, pickled, printed; and made of nothing that they are not."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from meshes import on_mesh

from phalanx.tensor import (
    DTensor,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from phalanx.tensor.layout._placement import indices_of, ranges_of

pytestmark = pytest.mark.fast

PLACEMENTS: dict[str, Placement] = {
    "S(0)": Shard(0),
    "S(-1)": Shard(-1),
    "S(1)": Shard(dim=1),
    "_S(0, 2)": StridedShard(0, split_factor=2),
    "_S(0, 3)": StridedShard(0, 3),
    "R": Replicate(),
    "P(sum)": Partial(),
    "P(avg)": Partial("avg"),
    "P(min)": Partial("min"),
    "P(max)": Partial("max"),
    "P(product)": Partial("product"),
    "MaskP": MaskPartial(),
}


@pytest.mark.parametrize("text", PLACEMENTS)
def test_a_placement_is_a_value(text: str) -> None:
    placement = PLACEMENTS[text]
    assert repr(placement) == str(placement) == text
    for same in (pickle.loads(pickle.dumps(placement)), copy.copy(placement), copy.deepcopy(placement)):
        assert same == placement
        assert hash(same) == hash(placement)
        assert type(same) is type(placement)
    with pytest.raises(AttributeError, match="cannot be changed"):
        placement.dim = 3  # type: ignore[attr-defined]  # that is what must fail


def test_different_placements_are_different() -> None:
    for one, other in itertools.combinations([*PLACEMENTS.values(), StridedShard(0, 1), 0, "S(0)", None], 2):
        assert one != other
    assert len(set(PLACEMENTS.values())) == len(PLACEMENTS)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Shard(1.5), TypeError),  # type: ignore[arg-type]  # that is what must fail; below too
        (lambda: Shard("0"), TypeError),  # type: ignore[arg-type]
        (lambda: Shard(None), TypeError),  # type: ignore[arg-type]
        (lambda: StridedShard(0, 1.5), TypeError),  # type: ignore[arg-type]
        (lambda: StridedShard(0, 0), ValueError),
        (lambda: Partial("median"), ValueError),
        (lambda: Partial(None), ValueError),  # type: ignore[arg-type]
        (lambda: MaskPartial("max"), ValueError),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_placement_is_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("length", range(14))
def test_ranges_are_the_indices(length: int) -> None:
    kinds = [Shard(0), StridedShard(0, 2), StridedShard(0, 3)]
    for first, second in itertools.product(kinds, kinds):
        for at in itertools.product(range(3), range(2)):
            cuts = [(first, 3, at[0]), (second, 2, at[1])]
            ranges = ranges_of(length, cuts)
            assert [i for start, size in ranges for i in range(start, start + size)] == indices_of(length, cuts)
            assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(ranges))  # neighbours are joined


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_the_data_of_one_rank_is_spread(mesh_shape: tuple[int, ...]) -> None:
    """Of every axis the rank at ``src_data_rank`` counts; what others hold never shows."""
    whole = torch.arange(45.0).view(9, 5)
    options = [Replicate(), Shard(0), Shard(-1), StridedShard(0, 2)]

    def body(mesh: Any) -> None:
        for src, layout in itertools.product((0, 1), itertools.product(options, repeat=mesh.ndim)):
            is_source = mesh.get_coordinate() == (src,) * mesh.ndim
            x = distribute_tensor(whole if is_source else whole - 100, mesh, layout, src_data_rank=src)
            expected = distribute_tensor(whole, mesh, layout, src_data_rank=None)
            assert torch.equal(x.to_local(), expected.to_local()), layout
            assert torch.equal(x.full_tensor(), whole), layout

    on_mesh(body, *mesh_shape)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    def body(mesh: Any) -> None:
        with pytest.raises(ValueError, match=r"from_local got .*\[2, 3\].*\[2, 4\]"):
            DTensor.from_local(torch.ones(2, 3 + mesh.get_rank()), mesh, [Shard(0)])

    on_mesh(body, 2)


def test_gradients_that_cannot_be_those_of_the_part_are_refused() -> None:
    def body(mesh: Any) -> None:
        cut = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
        whole = distribute_tensor(torch.arange(4.0), mesh).requires_grad_()
        for take, layout in (
            (cut.to_local, [Partial()]),
            (cut.to_local, [Replicate()]),
            (whole.to_local, [Shard(0)]),
            (cut.full_tensor, [Shard(0)]),
        ):
            with pytest.raises(ValueError, match=r"rank \d: grad_placements=.* a gradient of shape"):
                take(grad_placements=layout)

    on_mesh(body, 2)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_gradients_of_a_part_are_taken_as_they_are_laid_out(mesh_shape: tuple[int, ...]) -> None:
    """``to_local`` and ``full_tensor``: what ranks give is one gradient, cut and summed as ``grad_placements`` says."""
    shape = (5, 4)

    def body(mesh: Any) -> None:
        rank = mesh.get_rank()
        given_options = [Replicate(), Partial("sum"), Partial("avg")]
        for before in itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=mesh.ndim):
            for reduced in itertools.product(given_options, repeat=mesh.ndim):
                given = [p if p.is_shard() else r for p, r in zip(before, reduced, strict=True)]
                x = distribute_tensor(
                    torch.zeros(shape), mesh, [Replicate() if p.is_partial() else p for p in before]
                ).redistribute(placements=before).detach().requires_grad_()  # fmt: skip
                own = torch.full(x.to_local().shape, 1.0)
                if any(p.is_partial() for p in given):  # replicas must agree, contributions need not
                    axes = [axis for axis, p in enumerate(given) if p.is_partial()]
                    own = own * (1 + sum(mesh.get_local_rank(axis) for axis in axes))
                x.to_local(grad_placements=given).backward(own)
                assert x.grad is not None
                expected = DTensor.from_local(own, mesh, given, shape=shape).full_tensor()
                torch.testing.assert_close(x.grad.full_tensor(), expected, msg=f"{rank}: {before} {given}")

    on_mesh(body, *mesh_shape)
