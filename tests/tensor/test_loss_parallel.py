"""Cross entropy of class-sharded logits: the loss and gradient of one device, and no gathered logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import Tensor

from phalanx.comm import observe
from phalanx.errors import RankFailed
from phalanx.tensor import Partial, Replicate, Shard, distribute_tensor
from phalanx.tensor.parallel import loss_parallel

pytestmark = pytest.mark.fast


def expected_of(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(logits, target, **options)
    loss.sum().backward()
    return loss.detach(), logits.grad


def check(logits: Tensor, target: Tensor, placements: list[Any], shape: tuple[int, ...], **options: Any) -> None:
    expected, grad = expected_of(logits, target, **options)

    def body(mesh: Any) -> None:
        mine = distribute_tensor(logits, mesh, placements).requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(mine, distribute_tensor(target, mesh), **options)
            loss.sum().backward()
        torch.testing.assert_close(whole(loss), expected)
        torch.testing.assert_close(whole(mine.grad), grad)

    on_mesh(body, *shape)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_classes(reduction: str, size: int) -> None:
    torch.manual_seed(0)
    check(torch.randn(5, 6), torch.tensor([0, 5, 2, -100, 3]), [Shard(1)], (size,), reduction=reduction)


def test_more_ranks_than_classes() -> None:
    check(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), [Shard(1)], (3,))


def test_one_row_without_batch() -> None:
    check(torch.tensor([1.0, 2.0, 0.5]), torch.tensor(1), [Shard(0)], (2,))


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(1), Shard(2)]])
def test_classes_and_rows_on_two_axes(placements: list[Any]) -> None:
    torch.manual_seed(1)
    target = torch.randint(0, 5, (4, 3))
    check(torch.randn(4, 5, 3), target, placements, (2, 2), ignore_index=2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights(reduction: str) -> None:
    torch.manual_seed(2)
    target = torch.tensor([0, 3, 1, 3])
    weight = torch.tensor([1.0, 0.5, 2.0, 3.0])
    logits = torch.randn(4, 4)
    expected, grad = expected_of(logits, target, weight=weight, reduction=reduction)

    def body(mesh: Any) -> None:
        mine = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            given = distribute_tensor(weight, mesh, [Shard(0)])
            loss = F.cross_entropy(mine, target, weight=given, reduction=reduction)
        loss.sum().backward()  # outside of the block
        torch.testing.assert_close(whole(loss), expected)
        torch.testing.assert_close(whole(mine.grad), grad)

    on_mesh(body, 2)


def test_large_and_masked_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -float("inf"), 0.0, -1e4], [-float("inf"), -float("inf"), 3.0, 1.0]])
    check(logits, torch.tensor([0, 2]), [Shard(1)], (2,))


def test_what_is_not_sharded_by_class_runs_as_ever() -> None:
    torch.manual_seed(3)
    check(torch.randn(4, 3), torch.tensor([0, 1, 2, 2]), [Shard(0)], (2,))
    check(torch.randn(4, 3), torch.tensor([0, 1, 2, 2]), [Shard(1)], (2,), label_smoothing=0.1)
    check(torch.randn(4, 3), torch.rand(4, 3).softmax(1), [Shard(1)], (2,))


def test_only_row_sized_messages() -> None:
    def body(mesh: Any) -> list[tuple[str, int]]:
        logits = distribute_tensor(torch.randn(4, 1000), mesh, [Shard(1)]).requires_grad_()
        target = distribute_tensor(torch.tensor([1, 999, 5, 700]), mesh)
        events: list[tuple[str, int]] = []
        with loss_parallel(), observe(lambda event: events.append((event.name, event.nbytes))):
            F.cross_entropy(logits, target).backward()
        return events

    assert on_mesh(body, 2) == [[("all_reduce", 16)] * 3] * 2


def test_partial_logits_are_summed_first() -> None:
    def body(mesh: Any) -> float:
        from phalanx.tensor import DTensor

        local = torch.tensor([[0.5, 1.0]])
        logits = DTensor.from_local(local[:, mesh.get_local_rank("tp")][:, None], mesh, [Partial(), Shard(1)])
        with loss_parallel():
            return float(F.cross_entropy(logits, torch.tensor([1])))

    expected = float(F.cross_entropy(torch.tensor([[1.0, 2.0]]), torch.tensor([1])))
    assert on_mesh(body, 2, 2) == [pytest.approx(expected)] * 4


def test_a_target_out_of_range_is_named() -> None:
    def body(mesh: Any) -> None:
        logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
        with loss_parallel():
            F.cross_entropy(logits, distribute_tensor(torch.tensor([0, 4]), mesh, [Replicate()]))

    with pytest.raises(RankFailed, match="target 4 is out of range for 4 classes"):
        on_mesh(body, 2)
