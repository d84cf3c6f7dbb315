"""``torch._foreach_*``, each of them: on lists of DTensors they give what they give on plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole
from torch import Tensor

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast

NAMES = [name for name in dir(torch) if name.startswith("_foreach_")]
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
# Layouts of the first list and of the others, on a mesh of 2 x 2.
LAYOUTS = [
    ((S0, S1), (S0, S1)),
    ((S0, R), (S1, S0)),
    ((P, S0), (P, S0)),
    ((R, R), (S0, S0)),
    ((S1, P), (R, R)),
]


def lists(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, size, generator=generator, dtype=torch.float64) / 2 + 0.25 for size in (4, 5)]


def calls() -> Iterator[tuple[Any, ...]]:
    """Arguments of all forms; torch says which of them a function takes."""
    one, other, third = lists(1), lists(2), lists(3)
    yield (one,)
    yield one, other
    yield one, 2.0
    yield one, [2.0, 3.0]
    yield one, other, third
    yield one, other, 0.5
    yield one, other, [0.5, 0.25]
    yield one, other, third, 0.5
    yield one, other, third, [0.5, 0.25]
    yield one, other, third, torch.tensor([0.5, 0.25], dtype=torch.float64)
    yield 2.0, one


def copied(arg: Any) -> Any:
    return [t.clone() if isinstance(t, Tensor) else t for t in arg] if isinstance(arg, list) else arg


def laid_out(tensor: Tensor, mesh: Any, placements: Any) -> DTensor:
    made = distribute_tensor(tensor, mesh, [R if p == P else p for p in placements])
    return made.redistribute(placements=placements)


def compare(name: str, args: tuple[Any, ...], expected: list[Tensor], mesh: Any, layouts: Any) -> None:
    given = [
        [laid_out(t, mesh, layouts[min(i, 1)]) if isinstance(t, Tensor) else t for t in arg]
        if isinstance(arg, list)
        else arg
        for i, arg in enumerate(args)
    ]
    result = getattr(torch, name)(*given)
    found = given[0] if name.endswith("_") else result
    assert len(found) == len(expected)
    for ours, reference in zip(found, expected, strict=True):
        assert type(ours) is DTensor
        torch.testing.assert_close(whole(ours), reference)


@pytest.mark.parametrize("name", NAMES)
def test_every_list_function_on_every_layout(name: str) -> None:
    cases = []
    for args in calls():
        mine = tuple(map(copied, args))
        try:
            result = getattr(torch, name)(*mine)
        except (RuntimeError, TypeError, IndexError):  # not a form of this function
            continue
        cases.append((args, mine[0] if name.endswith("_") else list(result)))
    assert cases

    def body(mesh: Any) -> None:
        for args, expected in cases:
            for layouts in LAYOUTS:
                compare(name, args, expected, mesh, layouts)

    on_mesh(body, 2, 2)


def test_a_list_function_that_nobody_knows_is_not_run_on_parts() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.rand(4, 4), mesh, [S0])

        def _foreach_flipped(tensors: Any) -> Any:
            return [t.flip(0) for t in tensors]

        _foreach_flipped.__module__ = "torch"
        with pytest.raises(NotImplementedError, match=r"_foreach_flipped .*each of them"):
            DTensor.__torch_function__(_foreach_flipped, (DTensor,), ([x],))

    on_mesh(body, 2)


def test_results_have_the_dtype_that_torch_gives_them() -> None:
    def body(mesh: Any) -> None:
        whole_numbers = distribute_tensor(torch.arange(1, 5), mesh, [S0])
        (root,) = torch._foreach_sqrt([whole_numbers])
        assert root.dtype == torch.float32
        assert root.to_local().dtype == torch.float32
        torch.testing.assert_close(whole(root), torch.arange(1, 5).sqrt())

    on_mesh(body, 2)


def test_fused_functions_of_single_tensors_are_not_those_of_optimizers() -> None:
    def body(mesh: Any) -> None:
        plain = torch.rand(4, 3)
        x = distribute_tensor(plain, mesh, [S0])
        weight = torch.rand(3)
        found = torch._fused_rms_norm(x, (3,), distribute_tensor(weight, mesh), 1e-5)
        for ours, reference in zip(found, torch._fused_rms_norm(plain, (3,), weight, 1e-5), strict=True):
            torch.testing.assert_close(whole(ours), reference)

    on_mesh(body, 2)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_negation_of_contributions(op: str) -> None:
    def body(mesh: Any) -> None:
        x = DTensor.from_local(torch.tensor([1.0, 2.0]) + mesh.get_rank(), mesh, [Partial(op)])
        (negated,) = torch._foreach_neg([x])
        torch.testing.assert_close(negated.full_tensor(), -x.full_tensor())

    on_mesh(body, 2)
