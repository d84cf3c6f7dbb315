"""Assignment by index sends nothing of the tensor, and writes, and differentiates, what it would on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import on_mesh
from torch import Tensor

from phalanx.tensor import Replicate, Shard, distribute_tensor, fallback_counts
from phalanx.tensor.debug import CommDebugMode

pytestmark = pytest.mark.fast

SHAPE = (5, 6, 4)
ROWS, COLUMNS, MATRIX = torch.tensor([3, 0, -2]), torch.tensor([1, 5, 5]), torch.tensor([[1, 0], [3, -1]])

KEYS: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "one row": lambda d: 1,
    "last row": lambda d: -1,
    "rows": lambda d: slice(1, 4),
    "every other column": lambda d: (slice(None), slice(1, None, 2)),
    "one element": lambda d: (2, 3, 1),
    "after an ellipsis": lambda d: (..., 2),
    "a block": lambda d: (slice(0, 3), slice(2, 5), 0),
    "nothing": lambda d: slice(3, 3),
    "everything": lambda d: slice(None),
    "a list of rows": lambda d: [0, 3],
    "rows by a tensor": lambda d: d(ROWS),
    "rows by a matrix": lambda d: d(MATRIX),
    "columns by a tensor": lambda d: (slice(None), d(COLUMNS)),
    "pairs": lambda d: (d(ROWS), d(COLUMNS)),
    "pairs apart": lambda d: (d(ROWS), slice(None), d(ROWS)),
    "columns after an ellipsis": lambda d: (..., d(ROWS), d(ROWS)),
}
LAYOUTS = [
    [Shard(0), Replicate()],
    [Shard(1), Shard(2)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(2)],
    [Replicate(), Replicate()],
]


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", KEYS)
def test_by_values_of_every_shape(name: str, placements: list[Any]) -> None:
    key_of = KEYS[name]
    torch.manual_seed(6)
    plain = torch.randn(SHAPE)
    values = [torch.randn(plain[key_of(lambda t: t)].shape), torch.tensor(2.5)]
    values += [values[0][..., -1:]] if values[0].dim() else []

    def body(mesh: Any) -> None:
        def replicated(t: Tensor) -> Any:
            return distribute_tensor(t, mesh, src_data_rank=None)

        for number, value in enumerate([*values, 7.0]):
            expected = plain.clone()
            expected[key_of(lambda t: t)] = value
            x = distribute_tensor(plain, mesh, placements, src_data_rank=None)
            given = replicated(value) if isinstance(value, Tensor) else value
            key = key_of(replicated)
            before = sum(fallback_counts().values())
            with CommDebugMode() as seen:
                x[key] = given
            assert sum(fallback_counts().values()) == before, "computed replicated"
            assert not seen.get_total_counts()
            assert x.placements == tuple(placements)
            torch.testing.assert_close(x.full_tensor(), expected, msg=lambda m, n=number: f"value {n}: {m}")

    on_mesh(body, 2, 2)


@pytest.mark.parametrize("name", KEYS)
def test_gradients_of_tensor_and_value(name: str) -> None:
    """The value's gradient is a sum over the ranks, also those that wrote none of it."""
    key_of = KEYS[name]
    torch.manual_seed(7)
    plain, weight = torch.randn(SHAPE), torch.randn(SHAPE)
    value = torch.randn(plain[key_of(lambda t: t)].shape)

    def run(x: Any, v: Any, w: Any, lift: Callable[[Tensor], Any]) -> None:
        y = x * 2
        y[key_of(lift)] = v
        (y * w).sum().backward()

    x, v = plain.clone().requires_grad_(), value.clone().requires_grad_()
    unique = name not in ("pairs", "columns by a tensor", "columns after an ellipsis")
    run(x, v, weight, lambda t: t)

    def body(mesh: Any) -> None:
        for cut in range(3):
            mine = distribute_tensor(plain, mesh, [Shard(cut)], src_data_rank=None).requires_grad_()
            given = distribute_tensor(value, mesh, src_data_rank=None).requires_grad_()
            lift = lambda t: distribute_tensor(t, mesh, src_data_rank=None)  # noqa: E731
            run(mine, given, lift(weight), lift)
            torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
            if unique:  # of values for one place, torch does not say which one is kept
                torch.testing.assert_close(given.grad.full_tensor(), v.grad)

    on_mesh(body, 3)


@pytest.mark.parametrize("key", [5, -6, slice(None, None, 0)])
def test_keys_that_torch_refuses(key: Any) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
        with pytest.raises((IndexError, ValueError)):
            x[key] = 1.0
        with pytest.raises(IndexError):
            x[distribute_tensor(torch.tensor([0, 5]), mesh)] = 1.0
        with pytest.raises(RuntimeError):
            x[1:4] = distribute_tensor(torch.zeros(2, 2), mesh)
        assert not x.full_tensor().any()

    on_mesh(body, 2)


def test_masks_need_no_index() -> None:
    plain = torch.arange(20.0).view(5, 4)

    def body(mesh: Any) -> None:
        for cut in range(2):
            x = distribute_tensor(plain, mesh, [Shard(cut)], src_data_rank=None)
            expected = plain.clone()
            with CommDebugMode() as seen:
                x[x > 12] = -1
                x[x[:, :] < 3] = distribute_tensor(torch.tensor(4.0), mesh, src_data_rank=None)
            assert not seen.get_total_counts()
            expected[expected > 12] = -1
            expected[expected[:, :] < 3] = 4.0
            torch.testing.assert_close(x.full_tensor(), expected)
            rows = distribute_tensor(torch.arange(5) % 2 == 0, mesh, src_data_rank=None)
            x[rows] = 9
            expected[torch.arange(5) % 2 == 0] = 9
            torch.testing.assert_close(x.full_tensor(), expected)

    on_mesh(body, 3)
