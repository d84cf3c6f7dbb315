"""Copies and files of DTensors: what shares memory, has a gradient or is still on its way."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from meshes import on_mesh
from torch import nn

from phalanx.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.fast

WHOLE = torch.arange(20.0).reshape(5, 4)


def saved(tensor: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize(
    "take", [lambda t: pickle.loads(pickle.dumps(t)), saved, copy.deepcopy, copy.copy],
    ids=["pickle", "save", "deepcopy", "copy"],
)  # fmt: skip
def test_copies_of_what_is_on_its_way_wait_for_it(take: Any) -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(WHOLE, mesh, [Shard(0)])
        moved = x.redistribute(placements=[Replicate()], async_op=True)
        taken = take({"it": moved} if take is not copy.copy else moved)
        taken = taken["it"] if take is not copy.copy else taken
        assert type(taken) is DTensor
        assert taken.placements == (Replicate(),)
        assert torch.equal(taken.to_local(), WHOLE)
        assert torch.equal(moved.to_local(), WHOLE)

    on_mesh(body, 2)


def test_deepcopy_keeps_shared_memory() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        whole, view, part, again = copy.deepcopy([x, x.view(2, 2), x.to_local(), x])
        assert again is whole
        whole.add_(1)
        assert view.full_tensor().tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert part.tolist() == [1.0, 1.0]
        assert x.full_tensor().tolist() == [0.0] * 4

    on_mesh(body, 2)


def test_deepcopy_keeps_gradient_order_and_attributes() -> None:
    def body(mesh: Any) -> None:
        x = nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0)]).t().detach())
        x.tag = "mine"
        (x * x).sum().backward()
        assert x.grad is not None
        twin = copy.deepcopy(x)
        assert isinstance(twin, nn.Parameter)
        assert twin.tag == "mine"
        assert twin.requires_grad
        assert twin.stride() == x.stride()
        assert torch.equal(twin.grad.full_tensor(), x.grad.full_tensor())
        assert twin.grad.placements == x.placements
        twin.grad.zero_()
        with torch.no_grad():
            twin.zero_()
        assert torch.equal(x.full_tensor().detach(), WHOLE.t())
        assert torch.equal(x.grad.full_tensor(), 2 * WHOLE.t())

    on_mesh(body, 2)


def test_deepcopy_of_a_computed_tensor_is_refused() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(WHOLE, mesh, [Shard(0)]).requires_grad_()
        with pytest.raises(RuntimeError, match="only leaf DTensors"):
            copy.deepcopy(x * 2)
        with torch.inference_mode():
            made = x * 2
        assert torch.equal(copy.deepcopy(made).full_tensor(), 2 * WHOLE)

    on_mesh(body, 2)
