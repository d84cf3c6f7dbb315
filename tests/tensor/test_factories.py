"""Factories, ``*_like`` and ``new_*``: the values of torch's own, in the layout that was asked for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import phalanx.tensor as pt
from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import MaskPartial, Partial, Replicate, Shard, StridedShard

pytestmark = pytest.mark.fast


def test_factories_equal_torchs() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (3,))
        for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Partial()]):
            where = {"device_mesh": mesh, "placements": placements}
            assert pt.zeros(4, 5, **where).full_tensor().equal(torch.zeros(4, 5))
            assert pt.ones((4, 5), **where).full_tensor().equal(torch.ones(4, 5))
            assert pt.full((4, 5), 7, **where).full_tensor().equal(torch.full((4, 5), 7))
            assert pt.empty(4, 5, dtype=torch.int32, **where).dtype == torch.int32
            x = pt.ones(4, 5, requires_grad=True, **where)
            assert x.requires_grad
            assert x.placements == tuple(placements)
            assert torch.zeros_like(x).full_tensor().equal(torch.zeros(4, 5))
            assert torch.full_like(x, 3.0).full_tensor().equal(torch.full((4, 5), 3.0))
            assert x.new_ones(2, 3).full_tensor().equal(torch.ones(2, 3))
            assert x.new_full((2,), 4.0).full_tensor().tolist() == [4.0, 4.0]
            assert x.new_zeros(4, 5).shape == (4, 5)
            assert x.new_tensor([1.0, 2.0]).full_tensor().tolist() == [1.0, 2.0]
        line = pt.arange(2, 12, 3, device_mesh=mesh, placements=[Shard(0)])
        assert line.full_tensor().tolist() == [2, 5, 8, 11]
        with mesh:
            assert pt.zeros(3).device_mesh is mesh
        with pytest.raises(ValueError, match="no device mesh"):
            pt.zeros(3)

    comm.simulate(3).run(rank_main)


def test_placements_are_values() -> None:
    every = [Shard(0), Shard(1), StridedShard(0, 2), Replicate(), Partial(), Partial("max"), MaskPartial()]
    assert [repr(p) for p in every] == ["S(0)", "S(1)", "_S(0, 2)", "R", "P(sum)", "P(max)", "MaskP"]
    assert len(set(every)) == len(every)
    for p in every:
        assert pickle.loads(pickle.dumps(p)) == p
        assert copy.deepcopy(p) == p
        with pytest.raises(AttributeError, match="cannot be changed"):
            p.dim = 3  # type: ignore[misc]  # the mistake
    with pytest.raises(ValueError, match="Partial knows"):
        Partial("median")


def test_embedding_cut_by_rows_is_a_mask_partial() -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (3,))
        weight = torch.arange(14.0).view(7, 2)
        w = pt.distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        indices = torch.tensor([[0, 6, 3], [2, 2, 5]])
        out = torch.nn.functional.embedding(pt.distribute_tensor(indices, mesh), w)
        assert out.placements == (MaskPartial(),)
        assert out.full_tensor().equal(weight[indices])
        out.sum().backward()
        assert w.grad is not None
        assert w.grad.full_tensor()[2].tolist() == [2.0, 2.0]
        with pytest.raises(IndexError, match="out of range"):
            torch.nn.functional.embedding(pt.distribute_tensor(torch.tensor([7]), mesh), w)

    comm.simulate(3).run(rank_main)


def test_the_default_dtype_is_torchs() -> None:
    """Also where the same calls were met under another one before."""

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        wanted = torch.get_default_dtype()
        whole = torch.arange(4)
        x = pt.distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        for made in (pt.zeros, pt.ones, pt.rand):
            assert made(4, device_mesh=mesh, placements=[Shard(0)]).dtype == wanted
        assert pt.full((4,), 0.5, device_mesh=mesh).dtype == wanted
        for act in (lambda t: t / 2, lambda t: t * 0.5, torch.sin, torch.cosh):
            found, expected = act(x), act(whole)
            assert found.dtype == found.to_local().dtype == expected.dtype == wanted
            torch.testing.assert_close(found.full_tensor(), expected)

    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            comm.simulate(2).run(rank_main)
    finally:
        torch.set_default_dtype(before)
