"""Functions that copy only if they must: their result is the tensor itself, a view or a copy, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.tensor.core._strides import global_strides
from phalanx.tensor.layout._spec import Spec

pytestmark = pytest.mark.fast

LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((2,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((3,), [Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Shard(0), Replicate()]),
]

# From a tensor of four by four to one that may be it, a view of it or a copy.
MADE: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(-1),
    "reshape rows": lambda x: x.reshape(2, 2, 4),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: torch.ravel(x),
    "contiguous": lambda x: x.contiguous(),
    "transposed reshape": lambda x: x.t().reshape(-1),
    "transposed flatten": lambda x: x.t().flatten(),
    "transposed contiguous": lambda x: x.t().contiguous(),
    "twice transposed contiguous": lambda x: x.t().t().contiguous(),
    "columns contiguous": lambda x: x[:, 1:3].contiguous(),
    "columns reshape": lambda x: x[:, :2].reshape(-1),
    "column contiguous": lambda x: x[:, 1].contiguous(),
    "rows contiguous": lambda x: x[1:3].contiguous(),
    "rows reshape": lambda x: x[1:3].reshape(-1),
    "a dim more": lambda x: x[:, None].transpose(0, 1).contiguous(),
    "expanded contiguous": lambda x: x[:1].expand(4, 4).contiguous(),
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "flatten of one dim": lambda x: x.flatten(1, 1),
    "reshape of a reshape": lambda x: x.reshape(-1).reshape(8, 2),
    "reshape of rows": lambda x: x[2].reshape(2, 2),
}


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("made", MADE)
def test_writes_reach_what_they_reach_on_one_device(made: str, shape: Any, placements: Any) -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
        ours = distribute_tensor(plain, mesh, placements, src_data_rank=None)
        for x in (plain, ours):
            x.result = MADE[made](x)
        assert (ours.result is ours) == (plain.result is plain)
        copied = ours.result._copied_view
        if ours._spec.has_thin_shard and copied is not None and copied.base is None:
            with pytest.raises(RuntimeError, match="would not reach its base"):
                ours.result.mul_(2)
            return  # ranks with one row cannot tell whether it is a view
        for x in (plain, ours):
            x.result.mul_(2)
        torch.testing.assert_close(whole(ours), plain)
        torch.testing.assert_close(whole(ours.result), plain.result)

    on_mesh(body, *shape)


@pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated")
def test_the_tensor_itself_comes_back_where_nothing_is_to_be_done() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
        assert x.contiguous() is x.to(torch.float32) is x.float() is x.flatten(0, 0) is x.cpu() is x
        x.contiguous().t_()
        assert x.shape == (2, 4)
        assert whole(x).shape == (2, 4)
        leaf = distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).requires_grad_()
        assert leaf.flatten().is_leaf
        scalar = distribute_tensor(torch.zeros(()), mesh)
        assert scalar.mT is scalar

    on_mesh(body, 2)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_a_cast_to_the_dtype_that_it_has_is_the_tensor_itself_where_it_is_partial(op: str) -> None:
    def body(mesh: Any) -> None:
        for dtype in (torch.int64, torch.float32):
            local = torch.arange(4).to(dtype) * (mesh.get_rank() + 1)
            x = DTensor.from_local(local, mesh, [Partial(op)])
            assert x.positive() is x.to(dtype) is x.type(dtype) is x.type_as(x) is x.to("cpu") is x
            assert (x.long() if dtype is torch.int64 else x.float()) is x
            assert whole(x.int()).tolist() == whole(x).tolist()

    on_mesh(body, 2)


def test_a_reshape_that_moved_data_is_not_read_after_its_base_was_written() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(3, 5), mesh, [Shard(1)])
        flat, apart = x.reshape(-1), x.t().reshape(-1)
        x.add_(1)
        with pytest.raises(RuntimeError, match="out of date"):
            flat + 1
        assert not whole(apart).any()

    on_mesh(body, 2)


def test_a_reshape_that_moved_data_has_the_gradient_of_its_base() -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(15.0).reshape(3, 5).requires_grad_()
        ours = distribute_tensor(plain.detach(), mesh, [Shard(1)]).requires_grad_()
        for leaf in (plain, ours):
            x = leaf * 2
            flat = x.reshape(-1)
            flat.mul_(flat.detach().clone())
            (x * x + flat.reshape(3, 5)).sum().backward()
        torch.testing.assert_close(whole(ours.grad), plain.grad)

    on_mesh(body, 2)


def test_ranks_that_cannot_tell_the_order_of_memory_agree_with_those_that_can() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(9.0).reshape(3, 3), mesh, [Shard(0)], src_data_rank=None)
        y = x.t() * 2  # the last rank has one column of it, which may stand in either order
        flat = y.reshape(-1)
        torch.testing.assert_close(whole(flat), whole(y).reshape(-1))
        for write in (lambda: flat.add_(1), lambda: flat.reshape(3, 3).add_(1)):
            with pytest.raises(RuntimeError, match="would not reach its base"):
                write()
        y.add_(1)
        with pytest.raises(RuntimeError, match="out of date"):
            flat + 1

    on_mesh(body, 2)


def test_strides_and_contiguity_are_those_of_the_whole() -> None:
    def body(mesh: Any) -> None:
        plain = torch.zeros(4, 3, 2)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        for view in (
            lambda t: t,
            lambda t: t.transpose(0, 1),
            lambda t: t.transpose(0, 2),
            lambda t: t[:, :2],
            lambda t: t[:, :, 0],
            lambda t: t[:, :1].expand(4, 5, 2),
            lambda t: t.permute(2, 0, 1),
        ):
            assert view(x).stride() == view(plain).stride()
            assert view(x).is_contiguous() == view(plain).is_contiguous()

    on_mesh(body, 4)


def test_whole_strides_of_every_order_of_dims() -> None:
    def body(mesh: Any) -> None:
        for placements in ([Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]):
            plain = torch.zeros(4, 3, 8)
            spec = Spec.of(mesh, placements, plain.shape, plain.dtype)
            for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
                shape = [plain.shape[d] for d in order]
                cut = [p.on_dim(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements]
                part = torch.zeros(spec.local_shape).permute(order)
                found = global_strides(Spec.of(mesh, cut, shape, plain.dtype), part.stride())
                assert found == plain.permute(order).stride()

    on_mesh(body, 2)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.einsum("ij->ji", x),
        lambda x: torch.einsum("ii->i", x),
        lambda x: torch.einsum("...i->i...", x),
        lambda x: torch.meshgrid(x[:, 0], x[:, 1], indexing="ij")[0],
        lambda x: torch.atleast_3d(x),
        lambda x: x.unfold(0, 2, 1),
    ],
)
def test_what_is_computed_replicated_and_is_a_view_is_not_read_after_its_base_was_written(view: Any) -> None:
    def body(mesh: Any) -> None:
        for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
            plain = torch.arange(9.0).reshape(3, 3)
            x = distribute_tensor(plain.clone(), mesh, placements, src_data_rank=None)
            seen = view(x)
            x.add_(1)
            if seen._copied_view is None:  # it shares memory with x
                torch.testing.assert_close(whole(seen), view(plain + 1))
                continue
            with pytest.raises(RuntimeError, match="out of date"):
                seen + 0

    on_mesh(body, 2, 2)


def test_linear_with_a_bias_that_broadcasts() -> None:
    def body(mesh: Any) -> None:
        x = torch.arange(16.0).reshape(4, 4)
        for bias in (torch.ones(1), torch.arange(16.0).reshape(4, 4), torch.arange(4.0)):
            given = [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (x, x, bias)]
            torch.testing.assert_close(
                whole(torch.nn.functional.linear(*given)), torch.nn.functional.linear(x, x, bias)
            )

    on_mesh(body, 2)
