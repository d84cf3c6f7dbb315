"""What was decided or prepared once is used again only where it still holds: one test for each thing it depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from test_redistribute import contribution
from torch.overrides import TorchFunctionMode

from phalanx import comm
from phalanx.comm import DeviceMesh, init_device_mesh, observe
from phalanx.errors import GroupAborted
from phalanx.tensor import DTensor, Partial, Replicate, Shard, communication_mode, distribute_tensor
from phalanx.tensor.core._modes import ImplicitCommunicationError
from phalanx.tensor.dispatch import _run
from phalanx.tensor.dispatch._run import forget_decisions
from phalanx.tensor.ops._registry import OPERATORS, give_rule
from phalanx.tensor.ops._rule import Choice, Sharding

pytestmark = pytest.mark.fast

S0, S1, R, SUM = Shard(0), Shard(1), Replicate(), Partial("sum")


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) - 3


def test_arguments_that_are_equal_but_of_different_types_are_told_apart() -> None:
    calls: list[Any] = [
        lambda x: x.add(1),
        lambda x: x.add(True),
        lambda x: x.add(1.0),
        lambda x: torch.add(x, 1 + 0j),
        lambda x: torch.clamp(x, 0, 1),
        lambda x: torch.clamp(x, 0.0, 1.0),
        lambda x: torch.clamp(x, False, True),
        lambda x: x.sum(1),
        lambda x: x.sum((1,)),
        lambda x: x.sum(1, True),
        lambda x: x.sum(1, keepdim=True),
        lambda x: x.mul(2.0),
        lambda x: x.mul(2),
        lambda x: x.pow(2),
        lambda x: x.pow(0.5),
    ]

    def body(mesh: Any) -> None:
        plain = torch.arange(8).reshape(4, 2)
        for placement in (S0, R):
            x = distribute_tensor(plain, mesh, [placement])
            for _ in range(2):
                for call in calls:
                    result, expected = call(x), call(plain)
                    assert result.dtype is expected.dtype
                    torch.testing.assert_close(whole(result), expected)

    on_mesh(body, 2)


NUMBERS: dict[str, Any] = {
    "times": lambda x, n: x * n,
    "plus": lambda x, n: x + n,
    "from the left": lambda x, n: n - x,
    "method": lambda x, n: x.add(n),
    "function": lambda x, n: torch.add(x, n),
    "alpha": lambda x, n: torch.sub(x, x, alpha=n),
    "in place": lambda x, n: x.clone().mul_(n),
    "filled": lambda x, n: x.clone().fill_(n),
    "compared": lambda x, n: x > n,
    "equal": lambda x, n: x == n,
    "divided": lambda x, n: x / n,
    "floor": lambda x, n: x // n,
    "rounded": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "remainder": lambda x, n: x % n,
    "clamped": lambda x, n: x.clamp(0, n),
    "clamped by name": lambda x, n: torch.clamp(x, max=n),
    "chosen": lambda x, n: torch.where(x > 2, x, n),
    "masked": lambda x, n: x.masked_fill(x > 2, n),
    "like": lambda x, n: torch.full_like(x, n),
    "numpy's": lambda x, n: x * np.int64(n),
    "complex": lambda x, n: x * complex(1, n),
    "numpy's fraction": lambda x, n: x.mul(np.float64(n) / 3),
}


@pytest.mark.parametrize("way", NUMBERS)
def test_numbers_that_change_at_every_step_are_one_decision(way: str) -> None:
    call = NUMBERS[way]

    def body(mesh: Any) -> None:
        for dtype in (torch.float32, torch.int64, torch.uint8, torch.bool):
            plain = (numbers(5, 2) + 3).to(dtype)
            for placement in (S0, R):
                x = distribute_tensor(plain, mesh, [placement])
                for n in (1000, 3, 1, *range(40, 60), 100_000):
                    if n == 42:
                        known = len(_run._cache)
                    try:
                        expected = call(plain, n)
                    except RuntimeError as error:
                        with pytest.raises(type(error)):
                            call(x, n)
                        continue
                    result = call(x, n)
                    assert result.dtype is expected.dtype
                    assert result.placements == (placement,)
                    torch.testing.assert_close(whole(result), expected)
                assert len(_run._cache) == known

    on_mesh(body, 1)
    on_mesh(lambda mesh: [check_numbers(call, mesh, placement) for placement in (S0, R)], 2)


def check_numbers(call: Any, mesh: Any, placement: Any) -> None:
    """The same with ranks beside each other, of which one holds less, and with gradients."""
    plain = numbers(5, 2).requires_grad_(call is not NUMBERS["floor"])  # which has no derivative
    x = distribute_tensor(plain, mesh, [placement])
    for n in (40, 2, 41, -3):
        expected, result = call(plain, n), call(x, n)
        torch.testing.assert_close(whole(result), expected.detach())
        if expected.requires_grad:
            (wanted,) = torch.autograd.grad(expected.abs().sum(), plain)
            (found,) = torch.autograd.grad(result.abs().sum(), x)
            torch.testing.assert_close(whole(found), wanted)


def test_powers_depend_on_the_number_as_torch_says() -> None:
    def body(mesh: Any) -> None:
        for plain in (numbers(4, 2), numbers(4, 2).long()):
            x = distribute_tensor(plain, mesh, [S0])
            for n in (20, 0, 2, 1, 21):
                for call in (lambda t, n=n: t**n, lambda t, n=n: n ** t.abs(), lambda t, n=n: t.pow(n)):
                    torch.testing.assert_close(whole(call(x)), call(plain))
        with pytest.raises(RuntimeError, match="negative integer powers"):
            x**-17

    on_mesh(body, 2)


def test_sizes_dims_and_counts_are_told_apart() -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(24 * 20.0).reshape(24, 20)
        x = distribute_tensor(plain, mesh, [S0])
        for n in (17, 18, 19):
            for call in (
                lambda t, n=n: t[n],
                lambda t, n=n: t[:, n],
                lambda t, n=n: t.select(0, n),
                lambda t, n=n: t.narrow(1, 0, n),
                lambda t, n=n: t.split(n)[0],
                lambda t, n=n: t.topk(n).values,
                lambda t, n=n: t.tril(n),
                lambda t, n=n: t.roll(n, 0),
            ):
                torch.testing.assert_close(whole(call(x)), call(plain))
        for n in (0, 1):
            torch.testing.assert_close(whole(x.sum(n)), plain.sum(n))
        for reduction in (0, 1, 2):
            expected = torch.hinge_embedding_loss(plain, plain.sign(), 17, reduction)
            torch.testing.assert_close(whole(torch.hinge_embedding_loss(x, x.sign(), 17, reduction)), expected)

    on_mesh(body, 2)


def test_bad_arguments_are_refused_after_good_ones_of_the_same_value() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(numbers(4, 2), mesh, [S0])
        x.view(4, 2), x.transpose(0, 1)
        for bad in (lambda: x.view(4.0, 2), lambda: x.transpose(0.0, 1), lambda: x.transpose(0, 1.0)):
            with pytest.raises(TypeError):
                bad()

    on_mesh(body, 2)


def test_requires_grad_and_grad_mode_are_looked_at_in_every_call() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(numbers(4, 3), mesh, [S0])
        weight = distribute_tensor(numbers(3, 2), mesh, [R])
        seed = torch.ones_like(x @ weight)
        for _ in range(2):
            assert not (x @ weight).requires_grad
            weight.requires_grad_()
            with torch.no_grad():
                assert not (x @ weight).requires_grad
            (x @ weight).backward(seed)
            assert weight.grad is not None
            torch.testing.assert_close(whole(weight.grad), numbers(4, 3).T @ torch.ones(4, 2))
            weight.grad = None
            weight.requires_grad_(False)

    on_mesh(body, 2)


def test_modes_are_looked_at_in_every_call() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(numbers(4, 3), mesh, [S0])
        weight = distribute_tensor(numbers(3, 3), mesh, [R]).requires_grad_()
        other = distribute_tensor(numbers(4, 3), mesh, [S1])
        for _ in range(2):
            assert (x @ weight).requires_grad
            torch.testing.assert_close(whole(x + other), 2 * numbers(4, 3))
            with communication_mode("explicit"):
                with pytest.raises(ImplicitCommunicationError, match="sums the gradient"):
                    x @ weight
                with pytest.raises(ImplicitCommunicationError, match="needs its input"):
                    x + other
                x.redistribute(placements=[R])  # asked for, so not implicit
            with communication_mode("warn"), pytest.warns(UserWarning, match="needs its input"):
                x + other

    on_mesh(body, 2)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (S0, R, "all_gather_into_tensor"),
        (S0, S1, "all_to_all_single"),
        (SUM, R, "all_reduce"),
        (SUM, S0, "reduce_scatter_tensor"),
    ],
    ids=str,
)
def test_observers_see_every_move_and_an_ended_group_raises(before: Any, after: Any, name: str) -> None:
    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = contribution(numbers(4, 6), mesh, (before,)).requires_grad_()
        unobserved = x.redistribute(placements=[after])
        for _ in range(2):
            seen: list[Any] = []
            with observe(seen.append):
                again = x.redistribute(placements=[after])
            assert [(e.name, e.nbytes) for e in seen] == [(name, x.plan([after]).nbytes)]
            torch.testing.assert_close(again.to_local(), unobserved.to_local())
        mesh.get_group(0).abort()
        with pytest.raises(GroupAborted):
            x.redistribute(placements=[after])

    comm.simulate(2).run(rank_main)


def test_a_group_that_follows_a_closed_one_of_the_same_ranks_is_used() -> None:
    def rank_main(group: Any) -> None:
        for _ in range(3):
            part = group.subgroup(range(group.size))
            with part:
                mesh = DeviceMesh.from_group(part, "cpu")
                x = distribute_tensor(numbers(4, 6), mesh, [S0])
                assert torch.equal(x.full_tensor(), numbers(4, 6))
                assert torch.equal((x @ x.t()).full_tensor(), numbers(4, 6) @ numbers(4, 6).t())

    comm.simulate(2).run(rank_main)


def test_a_changed_rule_counts_for_methods_functions_and_operators() -> None:
    def replicate(call: Any) -> Sharding:
        return Sharding([Choice((R,) * len(call.inputs), (R,))])

    def body(mesh: Any) -> list[Any]:
        x = distribute_tensor(numbers(4, 2), mesh, [S0])
        scale = 0.5
        return [y.placements for y in (x.exp(), torch.exp(x), x * x, x * scale, x.mul(scale))]

    before = {name: OPERATORS[name] for name in ("exp", "mul")}
    assert on_mesh(body, 2) == [[(S0,)] * 5] * 2
    try:
        for name in before:
            give_rule(name, replicate)
        forget_decisions()
        assert on_mesh(body, 2) == [[(R,)] * 5] * 2
    finally:
        OPERATORS.update(before)
        forget_decisions()
    assert on_mesh(body, 2) == [[(S0,)] * 5] * 2


def test_copied_views_are_caught_on_every_way() -> None:
    ways: list[Any] = [
        lambda v, x: v.exp(),
        lambda v, x: torch.exp(v),
        lambda v, x: v + v,
        lambda v, x: v * 0.5,
        lambda v, x: v.sum(0),
        lambda v, x: F.linear(v, v),
        lambda v, x: torch.addcmul(v, v, v),
        lambda v, x: torch.add(v, v, alpha=2),
        lambda v, x: torch.clamp(v, 0.0, 1.0),
        lambda v, x: F.layer_norm(v, (2,)),
        lambda v, x: v.redistribute(placements=[R]),
    ]
    writes: list[Any] = [
        lambda v: v.mul_(0.5),
        lambda v: v.add_(v),
        lambda v: v.exp_(),
        lambda v: v.add_(v, alpha=2),
        lambda v: v.clamp_(0, 1),
        lambda v: v.lerp_(v, 0.5),
    ]

    def body(mesh: Any) -> None:
        for warm in (True, False):
            x = distribute_tensor(numbers(8), mesh, [S0])
            if warm:
                kept = distribute_tensor(numbers(4, 2), mesh, [x.view(4, 2).placements[0]])
                for way in ways:
                    way(kept, x)
                for write in writes:
                    write(kept.clone())
            x = distribute_tensor(numbers(6), mesh, [S0])
            view = x.view(3, 2)  # two ranks cannot cut three rows where the view would: it is a copy
            assert view._copied_view is not None
            for write in writes:
                with pytest.raises(RuntimeError, match="would write to a view"):
                    write(view)
            x.add_(1)
            for way in ways:
                with pytest.raises(RuntimeError, match="out of date"):
                    way(view, x)

    on_mesh(body, 2)


class Record(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_methods_and_operators() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(numbers(4, 2), mesh, [S0])
        for _ in range(2):
            expected = (x.view(2, 2, 2).sum(-1), x + x, x * 0.5)
            with Record() as record:
                got = (x.view(2, 2, 2).sum(-1), x + x, x * 0.5)
            assert [name for name in record.names if name in ("view", "sum", "add", "mul")] == [
                "view",
                "sum",
                "add",
                "mul",
            ]
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(whole(one), whole(other))

    on_mesh(body, 2)


def test_methods_of_a_tensor_under_way_wait_for_it() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(numbers(4, 2), mesh, [S0])
        for way in (
            lambda y: y.view(8),
            lambda y: y.sum(0),
            lambda y: y + x,
            lambda y: y * 0.5,
            lambda y: y.exp(),
        ):
            for _ in range(2):
                pending = x.redistribute(placements=[R], async_op=True)
                torch.testing.assert_close(whole(way(pending)), whole(way(x)))

    on_mesh(body, 2)


def test_autocast_counts_after_the_same_call_without_it() -> None:
    def body(mesh: Any) -> None:
        x, w, b = (distribute_tensor(numbers(*shape), mesh, [R]) for shape in ((4, 2), (3, 2), (3,)))
        for _ in range(2):
            for call in (lambda: F.linear(x, w, b), lambda: F.linear(x, w), lambda: x @ w.t()):
                assert call().dtype is torch.float32
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    result = call()
                assert result.dtype is torch.bfloat16
                assert result.to_local().dtype is torch.bfloat16

    on_mesh(body, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 2), (4, 5, 2), (0, 4, 2)], ids=str)
def test_moves_of_locals_that_are_not_contiguous(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layouts = [S0, S1, Shard(2), R] + ([SUM] if dtype.is_floating_point or dtype.is_complex else [])

    def body(mesh: Any) -> None:
        plain = (numbers(*shape) % 2 if dtype is torch.bool else numbers(*shape)).to(dtype)
        for before in layouts:
            made = distribute_tensor(plain, mesh, [R if before is SUM else before])
            local = made._local if before is not SUM or mesh.get_rank() == 0 else torch.zeros_like(made._local)
            turned = local.transpose(0, 2).contiguous().transpose(0, 2)
            x = DTensor.from_local(turned, mesh, [before], shape=plain.shape)
            for after in layouts[:4]:
                for _ in range(2):
                    moved = x.redistribute(placements=[after])
                    expected = distribute_tensor(plain, mesh, [after], src_data_rank=None).to_local()
                    assert torch.equal(moved.to_local(), expected), (before, after)

    on_mesh(body, 2)


def test_a_move_never_gives_out_the_memory_it_came_from() -> None:
    def body(mesh: Any) -> None:
        for before, after in ((R, S0), (S0, R), (SUM, R), (S0, S1), (S1, S0)):
            x = contribution(numbers(4, 6), mesh, (before,))
            for _ in range(2):
                kept = x.to_local().clone()
                x.redistribute(placements=[after]).add_(1)
                assert torch.equal(x.to_local(), kept), (before, after)

    on_mesh(body, 2)


def test_differentiating_twice_after_differentiating_once() -> None:
    """The way back of a move is shared by all of its uses, with and without a graph of its own."""

    def body(mesh: Any) -> None:
        plain = numbers(4, 6)
        x = contribution(plain, mesh, (SUM,)).requires_grad_()
        for _ in range(2):
            (x.redistribute(placements=[R]) ** 2).sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(whole(x.grad), 2 * plain)
            x.grad = None
            (once,) = torch.autograd.grad((x.redistribute(placements=[S0]) ** 3).sum(), x, create_graph=True)
            torch.testing.assert_close(whole(once), 3 * plain**2)
            (twice,) = torch.autograd.grad(once.sum(), x)
            torch.testing.assert_close(whole(twice), 6 * plain)

    on_mesh(body, 2)
