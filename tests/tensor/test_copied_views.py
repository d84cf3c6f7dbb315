"""Views that had to move data: what is written to them reaches their base, or raises; nothing reads old values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from meshes import Twice, on_mesh, whole

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast


def tenths(size: int = 12) -> torch.Tensor:
    return torch.arange(float(size)) / 10


def augmented(x: Any) -> None:
    x[:, 1] += 1
    x[1] *= 3
    x[1:3, ::2] -= 2
    x[0][1] += 7
    x[:, 1:][1:, 0] += 3
    x.t()[1] += 2
    x[..., 1:] /= 2
    x[None, :, 1] += 3
    x[[0, 2]] += 1
    x[1, 1] += 1


def methods(x: Any) -> None:
    column = x[:, 1]
    column.mul_(5).add_(1)
    column.neg_()
    x.select(1, -1).zero_()
    x.narrow(1, -3, 2).mul_(-1)
    x[-1].copy_(x[0].clone())
    x[:, 0].masked_fill_(x[:, 0] > 1, -1)
    x[:, 2][1] = 5.0
    row = x[2]
    row += 1
    row += row
    x[2].div_(4)


def behind_autograd(x: Any) -> None:
    x.data[0].zero_()
    with torch.no_grad():
        x[1].zero_()
        x.data[:, 1] += 1


WRITES = {"augmented assignment": augmented, "methods": methods, "data": behind_autograd}
MESHES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [Shard(0)]),
    ((2,), [Shard(1)]),
    ((3,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Shard(1)]),
    ((1,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(1)]),
    ((1, 2), [Shard(0), Replicate()]),
]


@pytest.mark.parametrize(("shape", "placements"), MESHES, ids=str)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [False, True])
def test_writes_reach_the_base(write: str, shape: Any, placements: Any, grad: bool) -> None:
    def body(mesh: Any) -> None:
        plain = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)
        ours = distribute_tensor(plain, mesh, placements, src_data_rank=None)
        for leaf in (plain, ours):
            x = leaf * 2
            WRITES[write](x)
            leaf.result = x
            if grad:
                (x**3).sum().backward()
        torch.testing.assert_close(whole(ours.result), plain.result.detach())
        if grad:
            torch.testing.assert_close(whole(ours.grad), plain.grad)

    on_mesh(body, *shape)


def test_a_view_stays_good_after_its_own_write_and_others_do_not() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(tenths(), mesh, [Shard(0)], src_data_rank=None)
        first, second = x[2:7], x[3:5]
        first.add_(1)
        torch.testing.assert_close(whole(first), tenths()[2:7] + 1)
        torch.testing.assert_close(whole(x[2:7]), tenths()[2:7] + 1)
        for use in (lambda: second + 1, lambda: second.add_(1)):
            with pytest.raises(RuntimeError, match="out of date"):
                use()
        x.add_(1)
        with pytest.raises(RuntimeError, match="out of date"):
            first + 1

    on_mesh(body, 2)


def test_a_leaf_that_requires_grad_is_written_as_torch_allows() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            x[:, 1] += 1
        assert not whole(x).any()
        with torch.no_grad():
            x[:, 1] += 1
        assert whole(x).sum() == 4

    on_mesh(body, 2)


def test_what_is_selected_by_lists_and_masks_is_a_copy_in_torch_too() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(tenths(), mesh, [Shard(0)], src_data_rank=None)
        mask = distribute_tensor(tenths() > 0.5, mesh, [Shard(0)], src_data_rank=None)
        copies = [x[[0, 2]], x[mask], x[distribute_tensor(torch.tensor([1, 3]), mesh)]]
        expected = [whole(one).clone() for one in copies]
        x.add_(1)
        for one, values in zip(copies, expected, strict=True):
            one.add_(1)
            torch.testing.assert_close(whole(one), values + 1)
        torch.testing.assert_close(whole(x), tenths() + 1)

    on_mesh(body, 2)


MOVES = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate())]


@pytest.mark.parametrize("shape", [(4, 4), (5, 4), (4, 3)], ids=str)
@pytest.mark.parametrize(("before", "after"), [*MOVES, (Partial("sum"), Shard(1))], ids=str)
def test_a_redistributed_tensor_is_written_in_place_under_autograd(
    before: Any, after: Any, shape: tuple[int, int]
) -> None:
    def body(mesh: Any) -> None:
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        x = distribute_tensor(plain.detach(), mesh, src_data_rank=None).redistribute(placements=[before])
        x = x.detach().requires_grad_()
        for leaf in (plain, x):
            y = leaf * 2
            if isinstance(y, DTensor):
                y = y.redistribute(placements=[after])
            y += 1
            y.t().mul_(y.detach().t().clone())
            y[0] *= 2
            y[:, 1:] = 3.0
            y.sum().backward()
            leaf.result = y
        torch.testing.assert_close(whole(x.result), plain.result.detach())
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), plain.grad)

    on_mesh(body, 2)


def test_on_an_axis_of_one_rank_a_redistributed_tensor_is_a_copy_too() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(tenths(), mesh, [Shard(0)], src_data_rank=None)
        for _ in range(2):
            x.redistribute(placements=[Replicate()]).add_(1)
        torch.testing.assert_close(whole(x), tenths())
        x.requires_grad_()
        (x * 2).redistribute(placements=[Replicate()]).mul_(2).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), torch.full((12,), 4.0))

    on_mesh(body, 1)


USES_OF_A_VIEW: dict[str, Any] = {
    "redistribute": lambda v: v.redistribute(placements=[Shard(0)]),
    "redistribute to the same layout": lambda v: v.redistribute(placements=v.placements),
    "redistribute later": lambda v: v.redistribute(placements=[Shard(0)], async_op=True).to_local(),
    "to_local": lambda v: v.to_local(),
    "full_tensor": lambda v: v.full_tensor(),
    "item": lambda v: v.sum().item(),
    "tolist": lambda v: v.tolist(),
    "norm": lambda v: torch.linalg.vector_norm(v),
    "argmax": lambda v: v.argmax(0),
    "bernoulli": lambda v: torch.bernoulli(v),
    "list function": lambda v: torch._foreach_add([v], 1.0),
    "list function, second": lambda v: torch._foreach_add([v.new_zeros(v.shape)], [v]),
    "function of the user": lambda v: Twice.apply(v),
    "data": lambda v: v.data,
    "pickle": lambda v: v.__reduce_ex__(2),
    "deepcopy": lambda v: copy.deepcopy(v),
}


@pytest.mark.parametrize("use", USES_OF_A_VIEW)
def test_no_use_of_a_copied_view_sees_old_values(use: str) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(12.0) / 12, mesh, [Shard(0)], src_data_rank=None)
        views = {
            "view": x[2:7],
            "view of it": x[2:7][:4],
            "view of a dead view": x[2:][1:9],
            "alias": x[2:7].detach(),
        }
        for view in views.values():
            USES_OF_A_VIEW[use](view)
        x.mul_(0.5)
        for view in views.values():
            with pytest.raises(RuntimeError, match="out of date"):
                USES_OF_A_VIEW[use](view)

    on_mesh(body, 2)


def test_no_write_to_a_copied_view_is_lost() -> None:
    writes: list[Any] = [
        lambda v: v.add_(1),
        lambda v: v.detach().add_(1),
        lambda v: v[0, :2].zero_(),
        lambda v: v.__setitem__(0, 5.0),
        lambda v: v.uniform_(),
        lambda v: torch._foreach_add_([v], 1.0),
        lambda v: torch._foreach_mul_([v, v.clone()], [v.clone(), v.clone()]),
        lambda v: torch.add(v, 1, out=v),
        lambda v: v.t_(),
    ]

    def body(mesh: Any) -> None:
        x = distribute_tensor(tenths(6), mesh, [Shard(0)], src_data_rank=None)
        for write in writes:  # two ranks cannot cut three rows where this view would
            with pytest.raises(RuntimeError, match="would not reach its base"):
                write(x.view(3, 2))
        for alias in (x[2:5].detach(), x[2:5].data, x[2:5].view(3, 1)):
            with pytest.raises(RuntimeError, match="would not reach its base"):
                alias.add_(1)
        with torch.inference_mode():
            y = distribute_tensor(tenths(6), mesh, [Shard(0)], src_data_rank=None)
            with pytest.raises(RuntimeError, match="would not reach its base"):
                y.view(3, 2).add_(1)
            y[2:4] += 1
            assert whole(y).tolist() == pytest.approx([0.0, 0.1, 1.2, 1.3, 0.4, 0.5])
        torch.testing.assert_close(whole(x), tenths(6))

    on_mesh(body, 2)


def test_random_and_list_functions_write_through() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
        x[:, 1].uniform_(1, 2)
        torch._foreach_add_([x[:, 2]], 1.0)
        x[:, 3:5].copy_(torch.linalg.inv(x[:2, 1:3] + 5.0).sum().expand(4, 2))
        x[:, 5].index_fill_(0, distribute_tensor(torch.tensor([0]), mesh), 4.0)
        found = whole(x)
        assert bool(((found[:, 1] >= 1) & (found[:, 1] < 2)).all())
        assert found[:, 2].tolist() == [1.0] * 4
        assert found[:, 5].tolist() == [4.0, 0.0, 0.0, 0.0]
        assert not found[:, 0].any()
        assert len(set(found[:, 3:5].flatten().tolist())) == 1

    on_mesh(body, 2)
