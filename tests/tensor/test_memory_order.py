"""Results have the order in memory that they have on one device: what copies and what shares memory follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole

from phalanx.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.fast

SHAPES = [(2, 4), (2, 4, 3), (4, 2), (3, 2, 2)]
BEFORE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda y: y,
    "a scalar added": lambda y: y + 1,
    "a clone": lambda y: y.clone(),
    "its square": lambda y: y * y,
    "relu": torch.relu,
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", BEFORE)
def test_what_is_written_to_a_copy_of_a_single_row_stays_there(before: str, shape: tuple[int, ...]) -> None:
    def body(mesh: Any) -> None:
        ways = itertools.product(range(len(shape)), itertools.permutations(range(len(shape))), AFTER)
        for dim, order, after in ways:
            plain = torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape)
            ours = distribute_tensor(plain.clone(), mesh, [Shard(dim)], src_data_rank=None)
            for x in (plain, ours):
                x.seen = BEFORE[before](x.permute(order))
                x.made = AFTER[after](x.seen)
            told = f"{shape} cut along {dim}, permuted {order}, {after}"
            assert (ours.made is ours.seen) == (plain.made is plain.seen), told
            mark = ours.made._stale
            if mark is not None and mark.base is None:  # data was moved, and no way leads back
                assert ours.seen._spec.has_thin_part, told
                with pytest.raises(RuntimeError, match="would not reach its base"):
                    ours.made.add_(5)
                continue
            for x in (plain, ours):
                x.made.add_(5)
            torch.testing.assert_close(whole(ours.seen), plain.seen, msg=told)
            torch.testing.assert_close(whole(ours.made), plain.made, msg=told)

    on_mesh(body, 2)
