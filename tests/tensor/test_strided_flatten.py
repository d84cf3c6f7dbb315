"""A cut inner dim that is flattened stays where it is, as a strided shard, and what follows works on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import Tensor

from phalanx.tensor import Replicate, Shard, StridedShard, distribute_tensor
from phalanx.tensor.debug import CommDebugMode

pytestmark = pytest.mark.fast

TARGET = torch.randint(0, 7, (3, 8), generator=torch.Generator().manual_seed(1))
TARGET[1, 5] = -100


def _loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))


def _summed_loss(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, 7), target.reshape(-1), reduction="sum")


def _projected(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    rows = F.layer_norm((logits.view(-1, 7) @ weight).relu(), (5,))
    return rows.log_softmax(-1).view(3, 8, 5).square().mean()


def _rows(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return (flat * flat.sum(1, keepdim=True)).mean(0).square().sum() + flat.unflatten(0, (3, 8))[1].square().sum()


@pytest.mark.parametrize("func", [_loss, _summed_loss, _projected, _rows])
@pytest.mark.parametrize(("shape", "placements"), [((2,), [Shard(1)]), ((4,), [Shard(1)]), ((3,), [Shard(1)]),
    ((2, 2), [Shard(1), Shard(2)]), ((3, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(1)]),
    ((2, 2), [Replicate(), Shard(1)])], ids=str)  # fmt: skip
def test_a_flattened_inner_dim_gives_what_one_device_gives(
    func: Callable[..., Any], shape: Any, placements: Any
) -> None:
    torch.manual_seed(2)
    logits, weight = torch.randn(3, 8, 7), torch.randn(7, 5)
    plain, plain_weight = logits.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = func(plain, TARGET, plain_weight)
    expected.backward()

    def body(mesh: Any) -> None:
        x = distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()
        of_target = [p if not p.is_shard(2) else Replicate() for p in placements]
        y = distribute_tensor(TARGET, mesh, of_target, src_data_rank=None)
        w = distribute_tensor(weight, mesh, src_data_rank=None).requires_grad_()
        result = func(x, y, w)
        torch.testing.assert_close(whole(result), expected.detach())
        result.backward()
        torch.testing.assert_close(whole(x.grad), plain.grad)
        if plain_weight.grad is not None:
            torch.testing.assert_close(whole(w.grad), plain_weight.grad)

    on_mesh(body, *shape)


def test_flattening_a_cut_sequence_sends_nothing() -> None:
    logits = torch.arange(3 * 8 * 7.0).reshape(3, 8, 7)

    def body(mesh: Any) -> None:
        x = distribute_tensor(logits, mesh, [Shard(1)], src_data_rank=None)
        y = distribute_tensor(TARGET, mesh, [Shard(1)], src_data_rank=None)
        with CommDebugMode() as seen:
            flat = x.flatten(0, 1)
            again = flat.view(3, 8, 7)
            labels = y.flatten()
        assert seen.get_total_counts() == 0
        assert flat.placements == (StridedShard(0, 3),)
        assert labels.placements == (StridedShard(0, 3),)
        assert again.placements == (Shard(1),)
        torch.testing.assert_close(whole(flat), logits.flatten(0, 1))
        torch.testing.assert_close(whole(again), logits)
        with CommDebugMode() as seen:
            loss = F.cross_entropy(flat, labels)
        assert seen.get_total_bytes() <= 8  # how many rows count
        torch.testing.assert_close(whole(loss), F.cross_entropy(logits.flatten(0, 1), TARGET.flatten()))

    on_mesh(body, 2)


def test_uneven_shards_are_moved_as_before() -> None:
    plain = torch.arange(30.0).reshape(2, 5, 3)

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, [Shard(1)], src_data_rank=None)
        torch.testing.assert_close(whole(x.flatten(0, 1)), plain.flatten(0, 1))
        torch.testing.assert_close(whole(x.flatten()), plain.flatten())

    on_mesh(body, 2)


def test_writing_to_a_strided_view_writes_to_the_tensor() -> None:
    plain = torch.arange(24.0).reshape(3, 8)

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, [Shard(1)], src_data_rank=None)
        x.view(-1).mul_(2)
        x.flatten()[:].add_(1)
        torch.testing.assert_close(whole(x), plain * 2 + 1)

    on_mesh(body, 2)
