"""local_map and register_sharding: users' functions on local parts, and rules for users' operations."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
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
from phalanx.tensor.core._tracing import handlers as found_handlers
from phalanx.tensor.debug import CommDebugMode
from phalanx.tensor.experimental import implicit_replication as exported
from phalanx.tensor.experimental import local_map, register_sharding
from phalanx.tensor.ops._registry import OPERATORS

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _rules_as_before() -> Iterator[None]:
    before, handlers = dict(OPERATORS), dict(found_handlers)
    yield
    for table, old in ((OPERATORS, before), (found_handlers, handlers)):
        table.clear()
        table.update(old)


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


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_results_in_lists_and_dicts_are_dtensors_too() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        rows, total = [Shard(0)], [Partial()]

        def nested(a: Tensor) -> dict[str, Any]:
            return {"same": a, "more": [a.sum(), Pair(a + 1, a + 2)], "size": a.numel()}

        found = local_map(nested, (rows, total, rows, rows, None))(x)
        assert list(found) == ["same", "more", "size"]
        assert found["same"].full_tensor().tolist() == [0, 1, 2, 3]
        assert found["more"][0].full_tensor().item() == 6
        assert type(found["more"][1]) is Pair
        assert found["more"][1].right.full_tensor().tolist() == [2, 3, 4, 5]
        assert found["size"] == 2
        as_list = local_map(lambda a: [a, a * 2], [rows, rows])(x)
        assert [t.full_tensor().tolist() for t in as_list] == [[0, 1, 2, 3], [0, 2, 4, 6]]
        (alone,) = local_map(lambda a: (a,), rows)(x)
        assert alone.placements == (Shard(0),)

    on_mesh(body, 2)


def test_arguments_in_lists_and_dicts_are_local_too() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()

        def joined(parts: list[Tensor], named: dict[str, Tensor]) -> Tensor:
            assert [type(t) for t in (*parts, *named.values())] == [Tensor] * 3
            return parts[0] + parts[1] * named["c"]

        rows = [Shard(0)]
        found = local_map(joined, rows, (rows, rows, rows), (rows, rows, rows))([x, x], {"c": x})
        assert found.full_tensor().tolist() == [0, 2, 6, 12]
        found.sum().backward()
        assert whole(x.grad).tolist() == [1, 3, 5, 7]

    on_mesh(body, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"result 0 is a tensor of shape \(2,\), but out_placements gives it none"),
        ({"out_placements": (None,)}, "result 0 is a tensor"),
        ({"out_placements": ([Shard(0)], [Shard(0)])}, "1 results for 2 out_placements"),
        ({"out_placements": [Shard(0)], "in_placements": ()}, "1 arguments for 0 in_placements"),
        (
            {"out_placements": [Shard(0)], "in_placements": ([Shard(0)],), "in_grad_placements": ()},
            "1 arguments for 0 in_grad_placements",
        ),
    ],
)
def test_placements_that_do_not_fit_are_named(options: dict[str, Any], text: str) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=text):
            local_map(lambda a: a, **options)(x)

    on_mesh(body, 2)


def test_a_placement_for_what_is_no_tensor_is_named() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert local_map(lambda a: a.numel())(x) == 2
        with pytest.raises(ValueError, match="result 1 is 3, not a tensor"):
            local_map(lambda a: (a, 3), ([Shard(0)], [Shard(0)]))(x)

    on_mesh(body, 2)


def test_meshes_that_differ_are_named() -> None:
    def body(mesh: Any) -> None:
        rows, columns = mesh["dp"], mesh["tp"]
        x = distribute_tensor(torch.arange(4.0), rows, [Shard(0)])
        y = distribute_tensor(torch.arange(4.0), columns, [Shard(0)])
        with pytest.raises(ValueError, match=r"(?s)argument 1 is on .*tp.*, argument 0 on .*dp.*: put them on one"):
            local_map(lambda a, b: a + b, [Shard(0)])(x, y)
        with pytest.raises(ValueError, match=r"(?s)argument 0 is on .*dp.*, device_mesh= is .*tp"):
            local_map(lambda a: a, [Shard(0)], device_mesh=columns)(x)
        assert local_map(lambda a: a, [Shard(0)], device_mesh=rows)(x).full_tensor().tolist() == [0, 1, 2, 3]

    on_mesh(body, 2, 2)


# ---- register_sharding


def test_a_rule_keeps_an_operation_where_it_is() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.randn(4, 3, 3), mesh, [Shard(0)])
        before = fallback_counts().get("diag_embed", 0)
        assert torch.diag_embed(x).placements == (Replicate(),)
        assert fallback_counts()["diag_embed"] == before + 1
        mesh.get_group().barrier()

        @register_sharding(torch.diag_embed)
        def embedded(x: Any) -> Any:
            return [([Shard(d)], [Shard(d)]) for d in range(len(x.shape) - 2)]

        x.requires_grad_()
        with CommDebugMode() as seen:
            out = torch.diag_embed(x)
            out.sum().backward()
        assert out.placements == (Shard(0),)
        assert seen.get_total_counts() == 0
        torch.testing.assert_close(out.full_tensor(), torch.diag_embed(x.full_tensor()))
        turned = torch.diag_embed(x.detach().redistribute(placements=[Shard(1)]))  # no choice: it is moved
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


def user_function(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    "op",
    [
        "add",
        None,
        3,
        lambda x: x,
        user_function,
        len,
        list.append,
        torch.nn.ReLU(),
        functools.partial(torch.add),
    ],
)
def test_what_is_no_operation_of_torch_gets_no_rule(op: Any) -> None:
    before = dict(OPERATORS)
    with pytest.raises(TypeError, match="register_sharding"):
        register_sharding(op)
    with pytest.raises(TypeError, match="register_sharding"):
        register_sharding([torch.linalg.inv, op])
    assert before == OPERATORS


def halved_somehow(x: Any) -> Any:
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(halved_somehow, (x,), x)
    return x / 2


def test_a_rule_for_a_function_written_in_python() -> None:
    register_sharding(halved_somehow)(lambda x: [])
    register_sharding(F.interpolate)(lambda x, *rest, **options: [([Shard(1)], [Shard(1)])])

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(8.0).view(1, 2, 4), mesh, [Shard(1)])
        found = F.interpolate(x, scale_factor=2)
        assert found.placements == (Shard(1),)
        torch.testing.assert_close(found.full_tensor(), F.interpolate(x.full_tensor(), scale_factor=2))
        half = halved_somehow(x)
        assert half.placements == (Replicate(),)  # the division itself would have kept the layout
        torch.testing.assert_close(half.full_tensor(), x.full_tensor() / 2)

    on_mesh(body, 2)


def relu(x: Any) -> Any:
    """A user's function with a name of torch's, and another meaning."""
    if type(x) is DTensor:
        return torch.overrides.handle_torch_function(relu, (x,), x)
    return x - x.sum()


def test_a_users_function_may_use_a_name_of_torch() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert relu(x).full_tensor().tolist() == [-6, -5, -4, -3]
        assert torch.relu(x).placements == (Shard(0),)

    on_mesh(body, 2)
    register_sharding(relu)(lambda x: [])
    on_mesh(body, 2)


def test_a_rule_for_a_custom_operation_by_what_its_decorator_returned() -> None:
    @torch.library.custom_op("phalanx_tests::halved", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return x / 2

    @halved.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    register_sharding(halved)(lambda x: [([Shard(0)], [Shard(0)])])

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert halved(x).placements == (Shard(0),)
        assert halved(x).full_tensor().tolist() == [0, 0.5, 1, 1.5]

    on_mesh(body, 2)


@pytest.mark.parametrize(
    "answer", [None, 3, [None], [Shard(0)], [([Shard(0)],)], [([Shard(0)], Shard(0))], [(["S"], [Shard(0)])]]
)
def test_a_rule_that_answers_something_else_is_named(answer: Any) -> None:
    register_sharding(torch.linalg.inv)(lambda x: answer)

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.eye(2).expand(2, 2, 2), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"the rule of linalg_inv .*\(placements of the results, placements of"):
            torch.linalg.inv(x)

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
