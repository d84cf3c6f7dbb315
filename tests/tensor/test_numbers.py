"""0-d tensors where torch takes numbers: positions, sizes, dims, factors. As on one device, plain or distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh, whole
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx import comm
from phalanx.comm import DeviceMesh
from phalanx.tensor import (
    DTensor,
    ImplicitCommunicationError,
    Partial,
    Replicate,
    Shard,
    communication_mode,
    distribute_tensor,
)

pytestmark = pytest.mark.fast

T = torch.arange(20.0).view(5, 4)


def assigned(x: Any, key: Any, value: Any) -> Any:
    x = x.clone()
    x[key] = value
    return x


# Of a tensor (5, 4), an integer tensor of 2 and a floating one of 2.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "x[i]": lambda x, i, f: x[i],
    "x[:, i]": lambda x, i, f: x[:, i],
    "x[i, i]": lambda x, i, f: x[i, i],
    "x[..., i]": lambda x, i, f: x[..., i],
    "x[None, i]": lambda x, i, f: x[None, i],
    "x[i, 1:3]": lambda x, i, f: x[i, 1:3],
    "x[i, [0, 1]]": lambda x, i, f: x[i, [0, 1]],
    "x[-i:]": lambda x, i, f: x[-i:],
    "x[int32]": lambda x, i, f: x[i.int()],
    "x[true]": lambda x, i, f: x[i == 2],
    "x[:, false]": lambda x, i, f: x[:, i == 3],
    "x[argmax]": lambda x, i, f: x.flatten()[x.argmax()],
    "x[i] = f": lambda x, i, f: assigned(x, i, f),
    "x[:, i] = f": lambda x, i, f: assigned(x, (slice(None), i), f),
    "x[i, 0] = f": lambda x, i, f: assigned(x, (i, 0), f),
    "repeat(i, 1)": lambda x, i, f: x.repeat(i, 1),
    "repeat((i, 1))": lambda x, i, f: x.repeat((i, 1)),
    "tile": lambda x, i, f: x.tile(i, 1),
    "expand": lambda x, i, f: x.expand(i, -1, -1),
    "broadcast_to": lambda x, i, f: x.broadcast_to((i, 5, 4)),
    "view": lambda x, i, f: x.view(5, i, 2),
    "reshape": lambda x, i, f: x.reshape(5, i, 2),
    "unflatten": lambda x, i, f: x.unflatten(1, (i, -1)),
    "narrow": lambda x, i, f: x.narrow(0, i, 1),
    "narrow to": lambda x, i, f: x.narrow(0, 0, i),
    "select": lambda x, i, f: x.select(0, i),
    "roll": lambda x, i, f: x.roll(i, 0),
    "tril": lambda x, i, f: x.tril(i),
    "pad": lambda x, i, f: F.pad(x, (i, i), value=1.0),
    "pad with": lambda x, i, f: F.pad(x, (1, 1), value=f),
    "split": lambda x, i, f: x.split(i),
    "chunk": lambda x, i, f: x.chunk(i, 1),
    "topk": lambda x, i, f: x.topk(i, 0).values,
    "one_hot": lambda x, i, f: F.one_hot(x.long() % 3, i + 2),
    "sum": lambda x, i, f: x.sum(i - 2),
    "softmax": lambda x, i, f: F.softmax(x, i - 1),
    "unsqueeze": lambda x, i, f: x.unsqueeze(i),
    "squeeze": lambda x, i, f: x[:1].squeeze(i - 2),
    "unbind": lambda x, i, f: x.unbind(i - 1),
    "transpose": lambda x, i, f: x.transpose(i - 1, 0),
    "flip": lambda x, i, f: x.flip(i - 1),
    "stack": lambda x, i, f: torch.stack([x, x], i),
    "cat": lambda x, i, f: torch.cat([x, x], dim=i - 1),
    "cumsum": lambda x, i, f: x.cumsum(i - 1),
    "arange": lambda x, i, f: torch.arange(i),
    "arange from": lambda x, i, f: torch.arange(1, f, 0.5),
    "linspace": lambda x, i, f: torch.linspace(0, f, i),
    "zeros": lambda x, i, f: torch.zeros(i, 3),
    "eye": lambda x, i, f: torch.eye(i),
    "full": lambda x, i, f: torch.full((i, 3), f),
    "full_like": lambda x, i, f: torch.full_like(x, f),
    "new_full": lambda x, i, f: x.new_full((2,), f),
    "new_zeros": lambda x, i, f: x.new_zeros(i, 3),
    "clamp": lambda x, i, f: x.clamp(f, f + 3),
    "clamp max": lambda x, i, f: x.clamp(max=i),
    "masked_fill": lambda x, i, f: x.masked_fill(x > 2, f),
    "add alpha": lambda x, i, f: torch.add(x, x, alpha=f),
    "addcmul": lambda x, i, f: torch.addcmul(x, x, x, value=f),
    "lerp": lambda x, i, f: torch.lerp(x, x + 1, f),
    "pow": lambda x, i, f: x**f,
    "norm": lambda x, i, f: torch.linalg.vector_norm(x, f),
    "layer_norm": lambda x, i, f: F.layer_norm(x, (4,), eps=f),
    "leaky_relu": lambda x, i, f: F.leaky_relu(x - 9, f),
    "elu": lambda x, i, f: F.elu(x - 9, f),
    "iteration": lambda x, i, f: [x[j] for j in torch.arange(5)],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_0d_tensor_is_a_number_as_on_one_device(name: str) -> None:
    call = CALLS[name]
    expected = tree_leaves(call(T, torch.tensor(2), torch.tensor(2.0)))

    def body(mesh: DeviceMesh) -> None:
        numbers: list[tuple[Tensor, Tensor]] = [(torch.tensor(2), torch.tensor(2.0))]
        for placement in (Replicate(), Partial()):
            whole_ones = [distribute_tensor(t, mesh) for t in numbers[0]]
            numbers.append(tuple(t.redistribute(placements=[placement]) for t in whole_ones))  # type: ignore[arg-type]
        for placement in (Shard(0), Shard(1), Replicate()):
            x = distribute_tensor(T, mesh, [placement])
            for i, f in numbers:
                ours = tree_leaves(call(x, i, f))
                assert len(ours) == len(expected)
                for mine, one in zip(ours, expected, strict=True):
                    assert mine.dtype == one.dtype
                    assert torch.allclose(whole(mine), one), (placement, i)

    on_mesh(body, 2)


def test_an_element_chosen_by_a_tensor_is_a_view() -> None:
    def body(mesh: DeviceMesh) -> None:
        for i in (torch.tensor(2), distribute_tensor(torch.tensor(2), mesh)):
            for placement in (Shard(0), Shard(1), Replicate()):
                expected = T.clone()
                x = distribute_tensor(T, mesh, [placement])
                for one in (expected, x):
                    one[torch.tensor(2) if one is expected else i].add_(1)
                    one[:, torch.tensor(2) if one is expected else i] += 1
                assert torch.equal(x.full_tensor(), expected)

    on_mesh(body, 2)


def test_gradients_pass_an_element_chosen_by_a_tensor() -> None:
    def body(mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(T, mesh, [placement]).requires_grad_()
            (x[x.detach()[:, 0].argmax()] ** 2).sum().backward()
            assert x.grad is not None
            assert x.grad.full_tensor().tolist() == [[0.0] * 4] * 4 + [[32.0, 34.0, 36.0, 38.0]]

    on_mesh(body, 2)


def test_positions_out_of_range_and_numbers_that_require_grad_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(T, mesh, [Shard(0)])
        with pytest.raises(IndexError, match="out of bounds"):
            x[torch.tensor(5)]
        factor = distribute_tensor(torch.tensor(2.0), mesh).requires_grad_()
        with pytest.raises(TypeError, match=r"add takes a number .*requires grad.*test_numbers\.py"):
            torch.add(x, x, alpha=factor)

    on_mesh(body, 2)


def test_reading_a_partial_number_is_communication() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = distribute_tensor(T, mesh)
        i = DTensor.from_local(torch.tensor(1), mesh, [Partial()])
        events: list[Any] = []
        with comm.observe(events.append):
            assert whole(x[i])[0] == 8
        assert len(events) == 1
        with communication_mode("explicit"):
            with pytest.raises(ImplicitCommunicationError, match="__getitem__ needs"):
                x[i]
            with pytest.raises(ImplicitCommunicationError, match="reading a number"):
                torch.arange(i)

    on_mesh(body, 2)


@pytest.mark.parametrize("mesh_shape", [(1,), (1, 2), (2, 1)])
def test_norms_over_axes_of_one_rank(mesh_shape):
    """As on a mesh of more: clipping a model that runs on one rank for once."""
    full = torch.arange(12.0).view(6, 2)

    def main(group):
        mesh = comm.init_device_mesh("cpu", mesh_shape)
        x = distribute_tensor(full, mesh, [Shard(0)] * len(mesh_shape), src_data_rank=None)
        norms = torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 2, 0), torch.linalg.vector_norm(x, 3, 1, True)
        return [norm.full_tensor() for norm in norms]

    expected = (
        torch.linalg.vector_norm(full), torch.linalg.vector_norm(full, 2, 0),
        torch.linalg.vector_norm(full, 3, 1, True),
    )  # fmt: skip
    for found in comm.simulate(torch.Size(mesh_shape).numel()).run(main):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
