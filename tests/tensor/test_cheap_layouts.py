"""Rules that save communication: what they send, and that results and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import nn

from phalanx.tensor import Partial, Replicate, Shard, distribute_tensor, fallback_counts
from phalanx.tensor.debug import CommDebugMode

pytestmark = pytest.mark.fast

ROWS, COLUMNS = torch.tensor([4, 0, 2]), torch.tensor([[1, 0], [2, 2]])


def sent(func: Callable[..., Any], *tensors: Any) -> tuple[Any, dict[str, int], int]:
    before = sum(fallback_counts().values())
    with CommDebugMode() as seen:
        result = func(*tensors)
    assert sum(fallback_counts().values()) == before, "computed replicated"
    return result, dict(seen.get_comm_counts()), seen.get_total_bytes()


@pytest.mark.parametrize("func", [torch.argmax, torch.argmin])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("placements", [[Shard(1), Replicate()], [Shard(1), Shard(1)], [Shard(0), Shard(1)]])
def test_argmax_over_a_cut_dim_gathers_candidates_only(func: Any, keepdim: bool, placements: Any) -> None:
    torch.manual_seed(3)
    plain = torch.randint(0, 6, (6, 4096)).double()  # many equals: the first one counts
    plain[2, 3000] = plain[2, 100] = torch.nan

    def body(mesh: Any) -> None:
        x = distribute_tensor(plain, mesh, placements, src_data_rank=None)
        result, _, nbytes = sent(lambda t: func(t, 1, keepdim), x)
        torch.testing.assert_close(result.full_tensor(), func(plain, 1, keepdim))
        assert nbytes <= 6 * 4 * (8 + 8) * 2 < plain.numel() * 8 / 40

    on_mesh(body, 2, 2)


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x.argmax(),
        lambda x: x.argmin(1),
        lambda x: x.max(1).values,
        lambda x: x.topk(1, 1).values,
        lambda x: torch.einsum("ij,kj->ik", x, x),
    ],
)
def test_of_a_dim_cut_twice_a_rank_in_the_middle_may_hold_nothing(func: Any) -> None:
    plain = torch.arange(21.0).reshape(3, 7).roll(5, 1)[:, torch.tensor([3, 0, 6, 2, 5, 1, 4])]

    def body(mesh: Any) -> None:  # 7 is cut into 4 + 3, the 4 into 2 + 2 + 0, the 3 into 1 + 1 + 1
        x = distribute_tensor(plain, mesh, [Shard(1), Shard(1)], src_data_rank=None).requires_grad_()
        wanted = plain.clone().requires_grad_()
        ours, expected = func(x), func(wanted)
        torch.testing.assert_close(whole(ours), expected.detach())
        if expected.requires_grad:
            for result in (ours, expected):
                (result * result).sum().backward()
            torch.testing.assert_close(whole(x.grad), wanted.grad)

    on_mesh(body, 2, 3)


@pytest.mark.parametrize("func", [torch.argmax, torch.argmin])
@pytest.mark.parametrize(
    "placements", [[Shard(1), Replicate()], [Shard(1), Shard(1)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]]
)
def test_argmax_of_all_gathers_candidates_only(func: Any, placements: Any) -> None:
    torch.manual_seed(3)
    plain = torch.randint(0, 6, (5, 2, 6, 301)).double()  # many equals: the first one counts
    plain[1, 1, 5, 7] = plain[1, 0, 5, 300] = torch.nan

    def body(mesh: Any) -> None:
        for one in plain:
            for tensor in (one, one[0], one.transpose(0, 2)):
                x = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                result, _, nbytes = sent(func, x)
                torch.testing.assert_close(result.full_tensor(), func(tensor))
                assert nbytes <= 4 * (8 + 8) * 2

    on_mesh(body, 2, 2)


@pytest.mark.parametrize(
    "func",
    [
        lambda x: torch.max(x, 1),
        lambda x: x.min(1, keepdim=True),
        lambda x: x.topk(3, 1),
        lambda x: x.topk(2, largest=False),
    ],
)
@pytest.mark.parametrize("placements", [[Shard(1), Replicate()], [Shard(1), Shard(1)], [Shard(0), Shard(1)]])
def test_the_largest_of_a_cut_dim_gather_candidates_only(func: Any, placements: Any) -> None:
    torch.manual_seed(4)
    plain = torch.randn(6, 1023)

    def body(mesh: Any) -> None:
        reference = plain.clone().requires_grad_()
        expected = func(reference)
        x = distribute_tensor(plain, mesh, placements, src_data_rank=None).requires_grad_()
        result, _, nbytes = sent(func, x)
        assert type(result) is type(expected)
        assert nbytes <= 6 * 4 * 3 * (4 + 8) * 2 < plain.numel() * 4 / 10
        torch.testing.assert_close(result.values.full_tensor(), expected.values)
        torch.testing.assert_close(result.indices.full_tensor(), expected.indices)
        (expected.values**2).sum().backward()
        (result.values**2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), reference.grad)

    on_mesh(body, 2, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_of_a_cut_batch_moves_no_logits(reduction: str, weighted: bool) -> None:
    torch.manual_seed(4)
    logits, target = torch.randn(7, 50).log_softmax(1), torch.randint(0, 50, (7,))
    target[3] = -100
    weight = torch.rand(50) if weighted else None

    def body(mesh: Any) -> None:
        reference = logits.clone().requires_grad_()
        expected = F.nll_loss(reference, target, weight, reduction=reduction)
        expected.sum().backward()
        x = distribute_tensor(logits, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        y = distribute_tensor(target, mesh, [Shard(0)], src_data_rank=None)
        w = None if weight is None else distribute_tensor(weight, mesh, src_data_rank=None)
        loss, _, nbytes = sent(lambda: F.nll_loss(x, y, w, reduction=reduction))
        assert nbytes <= 32
        torch.testing.assert_close(loss.full_tensor(), expected)
        loss.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), reference.grad)

    on_mesh(body, 3)


@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Shard(0), Shard(2)], [Shard(1), Shard(0)]])
def test_batch_norm_of_a_cut_batch_sends_statistics_only(placements: Any) -> None:
    """Two steps of training and one of evaluation; running statistics included."""
    torch.manual_seed(5)
    batches = torch.randn(3, 6, 4, 9, 9)

    def body(mesh: Any) -> None:
        plain, ours = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for name, parameter in list(ours.named_parameters()):
            ours.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh)))
        for name, buffer in list(ours.named_buffers()):
            ours.register_buffer(name, distribute_tensor(buffer, mesh))
        for step, batch in enumerate(batches):
            if step == 2:
                plain.eval()
                ours.eval()
            reference = batch.clone().requires_grad_()
            expected = plain(reference)
            x = distribute_tensor(batch, mesh, placements, src_data_rank=None).requires_grad_()
            result, _, nbytes = sent(ours, x)
            if placements[0] != Shard(1):  # else running statistics that are whole meet cut channels
                assert nbytes < batch.numel() * 4 / 4
            torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-4, atol=1e-5)
            (expected**3).sum().backward()
            (result**3).sum().backward()
            torch.testing.assert_close(whole(x.grad), reference.grad, rtol=1e-3, atol=1e-4)
        for (name, theirs), (_, mine) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
            torch.testing.assert_close(whole(mine), theirs, msg=name)
        for (name, p), (_, q) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
            torch.testing.assert_close(whole(q.grad), p.grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    on_mesh(body, 2, 2)


INDEXING: dict[str, tuple[Callable[..., Any], int]] = {
    "rows, columns cut": (lambda x, i, j: x[i], 1),
    "rows by a matrix": (lambda x, i, j: x[j], 2),
    "columns, rows cut": (lambda x, i, j: x[:, j], 0),
    "after an ellipsis": (lambda x, i, j: x[..., j], 0),
    "neighbours": (lambda x, i, j: x[:, j, j], 0),
    "apart: their dims come first": (lambda x, i, j: x[j, :, j], 1),
    "beside a slice": (lambda x, i, j: x[1:3, j], 2),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing_by_tensors_along_whole_dims_sends_nothing(name: str) -> None:
    func, cut = INDEXING[name]
    plain = torch.arange(5 * 4 * 3.0).reshape(5, 4, 3)

    def body(mesh: Any) -> None:
        reference = plain.clone().requires_grad_()
        expected = func(reference, ROWS, COLUMNS)
        x = distribute_tensor(plain, mesh, [Shard(cut)], src_data_rank=None).requires_grad_()
        indices = [distribute_tensor(i, mesh, src_data_rank=None) for i in (ROWS, COLUMNS)]
        result, counts, _ = sent(func, x, *indices)
        assert not counts
        torch.testing.assert_close(result.full_tensor(), expected)
        (result * result).sum().backward()
        (expected * expected).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), reference.grad)

    on_mesh(body, 3)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_where_elimination_failed_is_no_sum_over_ranks(op: str) -> None:
    torch.manual_seed(3)
    plain = torch.randn(3, 4, 4).double()
    plain[1, 2] = plain[1, 1]
    right = torch.randn(3, 4, 2).double()

    def body(mesh: Any) -> None:
        matrix = distribute_tensor(plain, mesh, [Replicate()], src_data_rank=None)
        parts = distribute_tensor(right, mesh, [Replicate()], src_data_rank=None).redistribute(placements=[Partial(op)])
        (result, info), counts, _ = sent(torch.linalg.solve_ex, matrix, parts)
        expected, at = torch.linalg.solve_ex(plain, right)
        assert not counts
        assert at[1] > 0
        assert torch.equal(info.full_tensor(), at)
        torch.testing.assert_close(result.full_tensor()[::2], expected[::2])

    on_mesh(body, 2)
