"""What torch.compile does not take of DTensors: each message of docs/compile.md, and what happens without fullgraph."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole
from test_compile_programs import fresh, spread, values  # noqa: F401  # a fixture

from phalanx import comm
from phalanx.tensor import (
    DTensor,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
    fallback_policy,
    init_device_mesh,
    zeros,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile.md"
pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


def own(function: Any) -> Any:
    """A copy with code of its own: what Dynamo once gave up on, it leaves alone, and simulated ranks share code."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def scaled(x: Any, factor: float) -> Any:
    return x * factor


def with_gradient(mesh: Any) -> Any:
    x = spread(mesh, values(6, 4), Shard(0))
    x.sum().full_tensor().backward()
    return x


# The beginning of a message: what gives it (function, arguments), and arguments to compile with before, if need be.
CASES: dict[str, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...] | None]]] = {
    "from_local inside torch.compile would ask the other ranks for their shapes": lambda mesh: (
        lambda x: DTensor.from_local(x, mesh, [Shard(0)]) * 2,
        (torch.ones(3),),
        None,
    ),
    "has to be copied, which no graph of torch.compile can keep in mind": lambda mesh: (
        lambda x: x[1] * 2,
        (spread(mesh, values(6, 4), Shard(0), grad=False),),
        None,
    ),
    "its dims are in another order in memory": lambda mesh: (
        lambda x: x.sum(0),
        (spread(mesh, values(4, 6), Shard(1)).detach().transpose(0, 1),),
        None,
    ),
    "this random operation cannot be traced": lambda mesh: (
        lambda x: torch.multinomial(x, 2) * 2,
        (spread(mesh, torch.ones(6, 4), Shard(0), grad=False),),
        None,
    ),
    "with a Python float that changes from call to call is not traced": lambda mesh: (
        scaled,
        (spread(mesh, values(6, 4), Shard(0)), 3.5),
        (spread(mesh, values(6, 4), Shard(0)), 2.5),
    ),
    "it is the gradient of another (optimizers stay outside)": lambda mesh: (
        lambda x: x.grad * 2,
        (with_gradient(mesh),),
        None,
    ),
}


def documented() -> list[str]:
    """The messages of the table of what breaks the graph, Dynamo's own left out."""
    table = PAGE.read_text().partition("## What breaks the graph")[2].partition("\n## ")[0]
    rows = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    return [found[0] for row in rows if (found := re.findall(r"`([^`]+)`", row))]


def test_every_message_of_the_page_is_tried() -> None:
    others = [
        "would be made while torch.compile traces",
        "on DTensors cannot be traced:",
    ]  # below
    assert sorted(documented()) == sorted([*CASES, *others])


@pytest.mark.parametrize("message", CASES)
def test_it_is_said_with_fullgraph_and_runs_as_it_is_without(message: str) -> None:
    def body(mesh: Any) -> None:
        function, given, before = CASES[message](mesh)
        function = own(function)
        strict = torch.compile(function, backend="aot_eager", fullgraph=True)
        if before is not None:
            strict(*before)
        with pytest.raises(Exception, match=re.escape(message)):
            strict(*given)
        torch.manual_seed(0)
        expected = whole(function(*given))
        torch.manual_seed(0)
        assert torch.equal(whole(torch.compile(own(function), backend="aot_eager")(*given)), expected)

    is_float = (
        "Python float" in message
    )  # that it changes Dynamo remembers by the line of code: for all simulated ranks
    on_mesh(body, 1 if is_float else 2, timeout=500.0)


def doubled_in_explicit_mode(x: Any) -> Any:
    with communication_mode("explicit"):
        return x * 2


def doubled_without_fallbacks(x: Any) -> Any:
    with fallback_policy("error"):
        return x * 2


SKIPPED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "distribute_tensor": lambda mesh: lambda x: distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]) * x,
    "zeros": lambda mesh: lambda x: zeros((6, 4), device_mesh=mesh, placements=[Shard(0)]) + x,
    "communication_mode": lambda mesh: doubled_in_explicit_mode,
    "fallback_policy": lambda mesh: doubled_without_fallbacks,
}


@pytest.mark.parametrize("name", SKIPPED)
def test_functions_of_ours_that_dynamo_does_not_read(name: str) -> None:
    def body(mesh: Any) -> None:
        x, function = spread(mesh, values(6, 4), Shard(0), grad=False), SKIPPED[name](mesh)
        with pytest.raises(Exception, match="marked as skipped"):
            torch.compile(own(function), backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(whole(torch.compile(own(function), backend="aot_eager")(x)), whole(function(x)))

    on_mesh(body, 2, timeout=500.0)


def test_probabilities_are_looked_at_before_a_draw() -> None:
    def body(mesh: Any) -> None:
        for placement in (Shard(0), Replicate()):
            chances = spread(mesh, torch.full((6, 4), 0.5), placement, grad=False)
            drawn = own(lambda x: torch.bernoulli(x) * 2)
            with pytest.raises(Exception, match="this random operation cannot be traced"):
                torch.compile(drawn, backend="aot_eager", fullgraph=True)(chances)
            results = []
            for function in (drawn, torch.compile(own(drawn), backend="aot_eager")):
                torch.manual_seed(0)
                results.append(whole(function(chances)))
            assert torch.equal(*results)

    on_mesh(body, 2, timeout=500.0)


def test_a_group_that_is_not_there_yet() -> None:
    def body(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = DTensor.from_local(values(6, 4), mesh, [Replicate(), Replicate()])  # which makes no group
        summed = own(lambda x: x.redistribute(placements=[Shard(0), Replicate()]).sum(0).full_tensor())
        with pytest.raises(Exception, match=r"would be made while torch\.compile traces"):
            torch.compile(summed, backend="aot_eager", fullgraph=True)(x)
        mesh.get_all_groups()
        assert torch.equal(torch.compile(own(summed), backend="aot_eager", fullgraph=True)(x), summed(x))

    comm.simulate(4, timeout=500.0).run(body)


def test_what_eager_refuses() -> None:
    def body(mesh: Any) -> None:
        x = spread(mesh, values(6, 4), Shard(0))
        added = own(lambda x: x + torch.ones(6, 4))
        with pytest.raises(Exception, match="on DTensors cannot be traced:"):
            torch.compile(added, backend="aot_eager", fullgraph=True)(x)
        kinds = []
        for function in (added, torch.compile(own(added), backend="aot_eager")):
            with pytest.raises(Exception) as caught:  # compared below
                function(x)
            kinds.append(type(caught.value))
        assert kinds[0] is kinds[1]

    on_mesh(body, 2, timeout=500.0)


def test_limits_in_backward() -> None:
    def body(mesh: Any) -> None:
        x, other = spread(mesh, values(6, 4), Shard(0)), spread(mesh, values(6, 4), Shard(0))
        cubed = torch.compile(lambda x: (x**3).sum(), backend="aot_eager", fullgraph=True)
        (first,) = torch.autograd.grad(cubed(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="with aot_autograd does not currently support double backward"):
            first.sum().full_tensor().backward()
        unused = torch.compile(lambda x, y: (x * 2, y * 3), backend="aot_eager", fullgraph=True)
        result, _ = unused(x, other)
        result.sum().full_tensor().backward()
        assert not whole(other.grad).any(), "zeros, where eager leaves None"

    on_mesh(body, 2, timeout=500.0)
