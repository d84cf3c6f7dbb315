"""``loss_parallel`` under torch.compile: one graph, the bits and collectives of eager, the block around it or in it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from test_compile_guards import check as check_guards
from test_compile_guards import inside
from test_compile_programs import check, fresh, spread, values  # noqa: F401  # a fixture
from torch import nn

from phalanx.tensor import Replicate, Shard
from phalanx.tensor.parallel import loss_parallel

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]
ROWS = [("all_reduce", 16)] * 3  # one number for each of four rows: the largest logit, the sum, the target's


def test_the_block_around_the_compiled_function() -> None:
    def body(mesh: Any) -> None:
        logits, target = spread(mesh, values(4, 10), Shard(1)), torch.tensor([1, 5, -100, 0])
        with loss_parallel():
            assert check(lambda x: F.cross_entropy(x, target), [logits]) == ROWS

    on_mesh(body, 2, timeout=500.0)


@pytest.mark.soak  # ten more graphs
def test_what_cross_entropy_may_be_asked_for() -> None:
    def body(mesh: Any) -> None:
        logits, first = spread(mesh, values(4, 10), Shard(1)), torch.zeros(4, dtype=torch.int64)
        target = spread(mesh, torch.tensor([1, 5, -100, 0]), Replicate(), grad=False)
        weight = spread(mesh, torch.linspace(1, 2, 10), Shard(0), grad=False)
        losses = nn.CrossEntropyLoss(reduction="none")
        with loss_parallel():
            check(lambda x: losses(x * 2, target).sin(), [logits])
            check(lambda x: F.cross_entropy(x, target=target, weight=weight, reduction="sum"), [logits])
            check(lambda x: F.cross_entropy(x, first), [spread(mesh, values(4, 1), Shard(1))])  # a rank has no class
            check(lambda x: F.cross_entropy(x, target.abs() % 10, label_smoothing=0.1), [logits])  # as it is outside

    on_mesh(body, 2, timeout=500.0)


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.soak)])
def test_the_block_in_the_compiled_function(shape: tuple[int, ...]) -> None:
    def body(mesh: Any) -> None:
        mesh.get_all_groups()
        target = spread(mesh, torch.tensor([1, 5, 9, 0]), *[Replicate()] * mesh.ndim, grad=False)

        def loss(x: Any) -> Any:
            x = x * 2
            with loss_parallel():
                found = F.cross_entropy(x, target)
            return found + F.cross_entropy(x, target)  # gathers: it is outside

        check(loss, [spread(mesh, values(4, 10), *[Shard(0), Shard(1)][-mesh.ndim :])])

    on_mesh(body, *shape, timeout=500.0)


def test_entering_and_leaving_the_block_is_guarded() -> None:
    def body(mesh: Any) -> None:
        logits = spread(mesh, values(4, 10), Shard(1))
        target = spread(mesh, torch.tensor([1, 5, 9, 0]), Replicate(), grad=False)
        blocks = [loss_parallel, contextlib.nullcontext, loss_parallel]
        check_guards(lambda x: F.cross_entropy(x, target), *(inside(block, logits) for block in blocks))

    on_mesh(body, 2, timeout=500.0)


def test_what_eager_refuses_is_refused() -> None:
    def body(mesh: Any) -> None:
        logits = spread(mesh, values(4, 10), Shard(1))
        compiled = torch.compile(lambda x, t: F.cross_entropy(x, t), backend="aot_eager")
        with loss_parallel():
            assert torch.equal(
                compiled(logits, torch.tensor([1, 5, 9, 0])).full_tensor(),
                F.cross_entropy(logits, torch.tensor([1, 5, 9, 0])).full_tensor(),
            )
            with pytest.raises(RuntimeError, match="a target is out of range for 10 classes"):
                compiled(logits, torch.tensor([1, 5, 10, 0]))
            with pytest.raises(ValueError, match="the target has shape"):
                compiled(logits, torch.tensor([1, 5]))

    on_mesh(body, 2, timeout=500.0)
