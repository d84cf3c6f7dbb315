"""Whatever changes after torch.compile has compiled a DTensor program: the next call gives the result of eager."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from test_compile_programs import fresh, spread, values  # noqa: F401  # a fixture
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from phalanx import comm
from phalanx.tensor import (
    Replicate,
    Shard,
    communication_mode,
    fallback_policy,
    implicit_replication,
    init_device_mesh,
)

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]
factor: Any = 2.0


def outcome(call: Callable[[], Any], leaves: Sequence[Any]) -> Any:
    """What ``call`` returns, the gradients of ``leaves``, warnings of ours and what was sent; or the error."""
    sent: list[Any] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        comm.observe(lambda event: sent.append((event.name, event.nbytes))),
    ):
        warnings.simplefilter("always")
        try:
            result = call()
            many = result if isinstance(result, tuple) else (result,)
            for one in many:
                if one.requires_grad and not one.is_leaf:
                    whole(one.square().sum()).backward()
        except Exception as error:  # compared by name
            return type(error).__name__
        finally:
            gradients = [None if leaf.grad is None else (whole(leaf.grad), leaf.grad.placements) for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
    told = sum("called at" in str(w.message) for w in warned)
    held = [(whole(r), r.dtype, getattr(r, "placements", None), r.requires_grad) for r in many]
    return held + [(g[0], g[1]) for g in gradients if g is not None], told, len(gradients), sent


def same(eager: Any, compiled: Any) -> bool:
    if isinstance(eager, str) or isinstance(compiled, str):
        return bool(eager == compiled)
    (ours, *facts), (theirs, *also) = eager, compiled
    facts_are = facts == also and [one[1:] for one in ours] == [one[1:] for one in theirs]
    return facts_are and all(torch.equal(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))


def check(
    function: Callable[..., Any], *calls: Callable[[Callable[..., Any]], Any], leaves: Sequence[Any] = ()
) -> None:
    """Each of ``calls`` gives the same with ``function`` and with one that was compiled at the first of them: values,
    gradients of ``leaves``, layouts, warnings, collectives."""
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(function, backend=counted)
    for place, call in enumerate(calls):
        eager = outcome(lambda call=call: call(function), leaves)
        graph = outcome(lambda call=call: call(compiled), leaves)
        assert same(eager, graph), (place, eager, graph)
        assert graphs, "nothing was compiled: this would show nothing"


def scaled(x: Any) -> Any:
    return x * factor


def with_factor(value: Any, x: Any) -> Callable[[Callable[..., Any]], Any]:
    def call(function: Callable[..., Any]) -> Any:
        global factor
        factor = value
        return function(x)

    return call


def inside(context: Callable[[], Any], *given: Any) -> Callable[[Callable[..., Any]], Any]:
    def call(function: Callable[..., Any]) -> Any:
        with context():
            return function(*given)

    return call


class Switched(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.times = 3.0
        self.weight = nn.Parameter(weight)

    def forward(self, x: Any) -> Any:
        return x * self.weight * self.times if self.training else x * self.weight


def test_layouts_shapes_and_meshes() -> None:
    def body(mesh: Any) -> None:
        rows, columns, replica = (spread(mesh, values(6, 4), p) for p in (Shard(0), Shard(1), Replicate()))
        plain = spread(mesh, values(6, 4), Shard(0), grad=False)
        turned = spread(mesh, values(4, 6), Shard(1)).detach().transpose(0, 1)
        given = [rows, columns, replica, plain, turned, *(spread(mesh, values(n, 4), Shard(0)) for n in (5, 9))]
        check(lambda x: x.sum(0), *(lambda f, x=x: f(x) for x in given), leaves=[x for x in given if x.requires_grad])
        by_layout = lambda x: x * 2 if x.placements == (Shard(0),) else x * 3  # noqa: E731
        leaves = [rows, columns, replica]
        check(by_layout, *(lambda f, x=x: f(x) for x in (*leaves, rows)), leaves=leaves)
        check(lambda x: x * 2 if x.requires_grad else x * 3, lambda f: f(rows), lambda f: f(plain), leaves=[rows])
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        check(lambda x: x.sum(0), lambda f: f(rows), lambda f: f(spread(other, values(6, 4), Shard(0))))

    on_mesh(body, 2, timeout=500.0)


def test_another_group_of_the_same_ranks() -> None:
    """A mesh that a program makes anew, over another group: what is sent goes over that. Costs one graph."""

    def body(mesh: Any) -> None:
        group = comm.current_group()
        later = group.subgroup(range(group.size))
        with comm.use_group(later):
            other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert other != mesh
        given = [spread(where, values(6, 4), Shard(0)) for where in (mesh, other)]
        sent: list[Any] = []
        compiled = torch.compile(lambda x: x.sum(0) * 2, backend="aot_eager", fullgraph=True)
        for x in (*given, *given):
            assert torch.equal(whole(compiled(x)), whole(x.sum(0) * 2))
            assert compiled(x).device_mesh is x.device_mesh
        with comm.observe(lambda event: sent.append(event.group)):
            for x in given:
                whole(compiled(x))
        assert [found is wanted for found, wanted in zip(sent, (group, later), strict=True)] == [True, True], sent

    on_mesh(body, 2, timeout=500.0)


def test_python_around_it() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(6, 4), Shard(0))
        check(scaled, *(with_factor(value, x) for value in (2.0, 3.0, 4.5, 1)), leaves=[x])
        model = Switched(spread(mesh, values(4), Replicate()).detach())
        compiled = torch.compile(model, backend="aot_eager")
        for times, training in ((3.0, True), (3.0, False), (5.5, True), (6.5, True)):
            model.times = times
            model.train(training)
            assert torch.equal(whole(model(x)), whole(compiled(x)))
        model.weight = nn.Parameter(spread(mesh, values(4) * 7, Shard(0)).detach())
        assert torch.equal(whole(model(x)), whole(compiled(x)))

    on_mesh(body, 1, timeout=500.0)  # of one rank: two would change one global at once


def test_modes_of_torch() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(4, 4), Shard(0))
        off = contextlib.nullcontext
        check(lambda x: x * 2, inside(off, x), inside(torch.no_grad, x), inside(off, x), leaves=[x])
        half = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
        check(lambda x: x @ x.T, inside(off, x), inside(half, x), inside(off, x), leaves=[x])

        def made(f: Callable[..., Any], dtype: torch.dtype) -> Any:
            torch.set_default_dtype(dtype)
            try:
                return f(x)
            finally:
                torch.set_default_dtype(torch.float32)

        in_place_of = lambda x: torch.zeros_like(x).to(torch.get_default_dtype()) + x.detach()  # noqa: E731
        check(in_place_of, lambda f: made(f, torch.float32), lambda f: made(f, torch.float64))

    on_mesh(body, 1, timeout=500.0)  # of one rank: the default dtype is one for all threads


def test_modes_of_ours() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(6, 4), Shard(0))
        modes = [lambda mode=mode: communication_mode(mode) for mode in ("auto", "explicit", "warn", "auto")]
        check(lambda x: x.sum(0) * 2 + x, *(inside(mode, x) for mode in modes), leaves=[x])
        policies = [lambda policy=policy: fallback_policy(policy) for policy in ("auto", "error", "warn", "auto")]
        check(lambda x: torch.linalg.qr(x)[1].abs(), *(inside(policy, x.detach()) for policy in policies))
        both = [implicit_replication, contextlib.nullcontext, implicit_replication]
        check(lambda x, t: x + t, *(inside(mode, x, torch.ones(6, 4)) for mode in both), leaves=[x])

    on_mesh(body, 2, timeout=500.0)


def test_seeds() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, torch.ones(64), Shard(0))

        def seeded(f: Callable[..., Any], seed: int) -> Any:
            torch.manual_seed(seed)
            return f(x), f(x)

        check(F.dropout, *(lambda f, seed=seed: seeded(f, seed) for seed in (1, 2, 1)), leaves=[x])

    on_mesh(body, 1, timeout=500.0)


def test_inputs_that_share_memory() -> None:
    def body(mesh: Any) -> None:
        def call(f: Callable[..., Any], shares: str) -> tuple[Tensor, ...]:
            a = spread(mesh, values(6, 4), Shard(0), grad=False)
            b = {"nothing": lambda: spread(mesh, values(6, 4), Shard(0), grad=False), "all": lambda: a}
            other: Any = b.get(shares, lambda: a.view(6, 4))()
            return f(a, other), a, other

        check(lambda a, b: a.mul_(2) + b, *(lambda f, s=s: call(f, s) for s in ("nothing", "all", "view", "nothing")))

    on_mesh(body, 2, timeout=500.0)
