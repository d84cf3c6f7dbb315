"""local_map and register_sharding: users' functions on local parts, and rules for users' operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole
from torch import Tensor

from phalanx.errors import RankFailed
from phalanx.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    fallback_counts,
    implicit_replication,
)
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.experimental import implicit_replication as exported
from phalanx.tensor.experimental import local_map, register_sharding
from phalanx.tensor.rules import RULES

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _rules_as_before() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


# ---- local_map


def test_column_and_row_products_with_gradients() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(3, 6), torch.randn(6, 4)
    plain_x, plain_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    (plain_x @ plain_w).square().sum().backward()

    def body(mesh: Any) -> None:
        def product(a: Tensor, b: Tensor) -> Tensor:
            assert type(a) is Tensor
            return a @ b

        by_rows = local_map(
            product,
            out_placements=[Partial()],
            in_placements=([Shard(1)], [Shard(0)]),
            redistribute_inputs=True,
        )
        by_columns = local_map(
            product,
            out_placements=[Shard(1)],
            in_placements=([Replicate()], [Shard(1)]),
            in_grad_placements=([Partial()], [Shard(1)]),
            redistribute_inputs=True,
        )
        for act in (by_rows, by_columns):
            mine_x = distribute_tensor(x, mesh).requires_grad_()
            mine_w = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
            out = act(mine_x, mine_w)
            out.square().sum().backward()
            torch.testing.assert_close(whole(out), x @ w)
            torch.testing.assert_close(whole(mine_x.grad), plain_x.grad)
            torch.testing.assert_close(whole(mine_w.grad), plain_w.grad)

    on_mesh(body, 2)


def test_as_a_decorator_with_several_results_and_plain_arguments() -> None:
    def body(mesh: Any) -> None:
        @local_map(out_placements=([Shard(0)], None, [Partial("max")]), in_placements=([Shard(0)], None))
        def parts(x: Tensor, factor: float) -> tuple[Tensor, int, Tensor]:
            """What it does."""
            return x * factor, x.shape[0], x.amax(0)

        scaled, rows, largest = parts(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]), 2.0)
        assert scaled.full_tensor().tolist() == [[0, 2], [4, 6], [8, 10]]
        assert rows == (2 if mesh.get_rank() == 0 else 1)
        assert largest.full_tensor().tolist() == [4, 5]
        assert parts.__doc__ == "What it does."

    on_mesh(body, 2)


def test_plain_arguments_need_a_mesh_and_give_dtensors() -> None:
    def body(mesh: Any) -> None:
        double = local_map(lambda x: x * 2, out_placements=[Shard(0)], device_mesh=mesh)
        assert tuple(double(torch.ones(2, 3)).shape) == (4, 3)

    on_mesh(body, 2)


@pytest.mark.parametrize(
    ("placements", "text"),
    [([Shard(0)], "redistribute_inputs"), ([Replicate(), Replicate()], "needs 1 placements")],
)
def test_another_layout_is_named(placements: list[Any], text: str) -> None:
    def body(mesh: Any) -> None:
        act = local_map(lambda x: x, out_placements=[Shard(0)], in_placements=(placements,))
        act(distribute_tensor(torch.ones(2, 2), mesh, [Shard(1)]))

    with pytest.raises(RankFailed, match=text):
        on_mesh(body, 2)


def test_a_number_of_arguments_or_results_that_does_not_fit_is_named() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(2, 2), mesh)
        with pytest.raises(ValueError, match="2 arguments for 1 in_placements"):
            local_map(lambda a, b: a, out_placements=[Replicate()], in_placements=([Replicate()],))(x, x)
        with pytest.raises(ValueError, match="2 results"):
            local_map(lambda a: (a, a), out_placements=([Replicate()],))(x)

    on_mesh(body, 2)


# ---- register_sharding


def test_a_rule_keeps_an_operation_where_it_is() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(4, 3, 3), mesh, [Shard(0)])
        before = fallback_counts().get("linalg_inv", 0)
        assert torch.linalg.inv(x).placements == (Replicate(),)
        assert fallback_counts()["linalg_inv"] == before + 1
        mesh.get_group().barrier()

        @register_sharding(torch.linalg.inv)
        def inverse(x: Any) -> Any:
            return [([Shard(d)], [Shard(d)]) for d in range(len(x.shape) - 2)]

        x.requires_grad_()
        with CommDebugMode() as seen:
            out = torch.linalg.inv(x)
            out.sum().backward()
        assert out.placements == (Shard(0),)
        assert seen.get_total_counts() == 0
        torch.testing.assert_close(out.full_tensor(), torch.linalg.inv(x.full_tensor()))
        turned = torch.linalg.inv(x.detach().redistribute(placements=[Shard(1)]))  # no choice: it is moved
        torch.testing.assert_close(turned.full_tensor(), out.full_tensor().detach())
        mesh.get_group().barrier()

    on_mesh(body, 2)


def custom_operation() -> Any:
    @torch.library.custom_op("phalanx_tests::scaled_sum", mutates_args=())
    def scaled_sum(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return (x + y) * scale

    @scaled_sum.register_fake
    def _(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return torch.empty_like(x)

    return torch.ops.phalanx_tests.scaled_sum


def test_operations_of_a_library() -> None:
    op = custom_operation()

    @register_sharding([op, op.default])
    def rule(x: Any, y: Any, scale: float) -> Any:
        assert scale == 2.0
        rows = [([Shard(d)], [Shard(d), Shard(d), None]) for d in range(len(x.shape))]
        return [*rows, ([Partial()], [Partial(), Partial(), None])]

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        for call in (op, op.default):
            with CommDebugMode() as seen:
                out = call(x, x, 2.0)
            assert out.placements == (Shard(0),)
            assert seen.get_total_counts() == 0
            assert out.full_tensor().tolist() == [0, 4, 8, 12, 16, 20]
        part = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        assert op(part, part, 2.0).placements == (Partial(),)
        assert op(part, part, 2.0).full_tensor().tolist() == [8, 8]

    on_mesh(body, 2)


def test_a_library_may_use_a_name_of_torch() -> None:
    """A rule for its ``relu`` says nothing about torch's, and a torch rule nothing about its own."""

    @torch.library.custom_op("phalanx_tests::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return x - x.sum()  # not pointwise at all

    @relu.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert torch.ops.phalanx_tests.relu(x).full_tensor().tolist() == [-6, -5, -4, -3]
        assert torch.ops.phalanx_tests.relu.default(x).full_tensor().tolist() == [-6, -5, -4, -3]
        assert torch.relu(x).placements == (Shard(0),)

    on_mesh(body, 2)
    register_sharding(torch.ops.phalanx_tests.relu)(lambda x: [])
    on_mesh(body, 2)


def test_a_rule_that_forgets_an_argument_is_named() -> None:
    @register_sharding(torch.linalg.solve)
    def rule(a: Any, b: Any) -> Any:
        return [([Shard(0)], [Shard(0)])]

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.eye(2).expand(2, 2, 2), mesh, [Shard(0)])
        torch.linalg.solve(x, x)

    with pytest.raises(RankFailed, match="lays out 1 of 2 tensor arguments"):
        on_mesh(body, 2)


def test_implicit_replication_is_the_same_switch() -> None:
    assert exported is implicit_replication

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="plain tensor"):
            x + torch.ones(2, 2)
        with exported():
            assert (x + torch.ones(2, 2)).placements == (Shard(0),)

    on_mesh(body, 2)
