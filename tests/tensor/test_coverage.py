"""A sample of the coverage report: torch's operator samples under many placements. Wrong must be zero.

``make coverage`` (``python tests/tensor/coverage.py``) runs all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coverage import RANDOM, REFUSED, UNINITIALISED, accepted_errors, cover, is_refusal, op_db
from meshes import on_mesh

from phalanx.tensor import Shard, distribute_tensor

# Every operator gets its first sample on two ranks; these get more, on more ranks: each stands for a family of rules.
DEEP = """
add mul div where clamp sum mean amax prod std logsumexp argmax cumsum matmul bmm addmm baddbmm einsum
linalg.vector_norm view reshape permute transpose expand squeeze unsqueeze unflatten flatten split chunk unbind
cat stack gather scatter_add index_select tril triu roll flip nn.functional.linear nn.functional.conv2d
nn.functional.layer_norm softmax log_softmax nn.functional.embedding nn.functional.cross_entropy
nn.functional.mse_loss nn.functional.pad sort topk nn.functional.scaled_dot_product_attention
nn.functional.dropout masked_fill __getitem__ index_put nn.functional.batch_norm nn.functional.max_pool2d
nn.functional.one_hot bernoulli clone to
""".split()  # noqa: SIM905  # a list of names reads best as text

PARTS = 8

pytestmark = pytest.mark.timeout(300)  # many operators each: a busy machine takes a minute


@pytest.mark.parametrize("part", range(PARTS))
def test_no_operator_is_wrong(part: int) -> None:
    wrong = []
    for index, op in enumerate(op_db):
        if index % PARTS == part:
            report = cover(op, 1, 3, (2,))
            wrong += [f"{op.name}: {p}" for p in report.problems if p.startswith("wrong")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("shape", "samples", "layouts", "order"),
    [
        ((3,), 1, 3, "rows"),
        ((2, 2), 1, 3, "rows"),
        pytest.param((4,), 1, 3, "reversed", marks=pytest.mark.soak),
        pytest.param((2,), 1, 3, "channels_last", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_families_on_more_ranks(shape: tuple[int, ...], samples: int, layouts: int, order: str) -> None:
    wrong = []
    for op in op_db:
        if op.name in DEEP:
            report = cover(op, samples, layouts, shape, order)
            wrong += [f"{op.name}: {p}" for p in report.problems if p.startswith("wrong")]
    assert not wrong, "\n".join(wrong)


def test_the_lists_name_operators_that_exist() -> None:
    known = {op.name for op in op_db}
    assert set(DEEP) <= known
    assert len(set(RANDOM) & known) > 10
    assert UNINITIALISED & known
    assert known >= REFUSED


def test_only_a_raise_of_ours_that_tells_of_dtensors_is_a_refusal() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        for act, expected in (
            (lambda: x.resize_(3), True),
            (lambda: torch.svd_lowrank(x.view(2, 2)), True),
            (lambda: x + torch.ones(4), True),
            (lambda: x.view(3), False),  # torch's words
            (lambda: torch.linalg.inv(x), False),
            (lambda: x.nothing, False),
            (lambda: distribute_tensor(torch.ones(4), mesh, [Shard(7)]), False),  # tells nothing of DTensors
        ):
            with pytest.raises(Exception) as caught:  # any
                act()
            assert is_refusal(caught.value) is expected, str(caught.value)

    on_mesh(body, 2)


@pytest.mark.parametrize("part", range(4))
def test_what_torch_refuses_is_refused(part: int) -> None:
    """Torch's samples of bad arguments: no layout makes them good."""
    accepted = []
    for index, op in enumerate(op for op in op_db if op.error_inputs_func is not None):
        if index % 4 == part:
            accepted += accepted_errors(op)
    assert not accepted, "\n".join(accepted)
