"""Slips of someone who comes from torch's DTensor: each message names what was given, what was expected, what to do.

On two ranks. ``SLIPS`` are calls on a DTensor ``x`` of shape (4, 2), cut by rows, and its mesh; the pattern is what the
user must read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from meshes import on_mesh
from torch import nn
from torch.distributed.tensor import Shard as TorchShard

from phalanx import comm
from phalanx.comm import init_device_mesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, zeros

pytestmark = pytest.mark.fast

Slip = tuple[Callable[[Any, Any], Any], type[Exception], str]


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_()


SLIPS: dict[str, Slip] = {
    # layouts
    "too many placements": (
        lambda x, mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]),
        ValueError,
        "a mesh of 1 axes needs 1 placements, one for each axis, got [S(0), S(0)]",
    ),
    "no placements at all": (
        lambda x, mesh: distribute_tensor(torch.ones(4), mesh, []),
        ValueError,
        "needs 1 placements, one for each axis, got []",
    ),
    "a number for placements": (
        lambda x, mesh: distribute_tensor(torch.ones(4), mesh, 0),
        TypeError,
        "expected a list of placements, one for each mesh axis, got 0",
    ),
    "a number for a placement": (
        lambda x, mesh: zeros(4, device_mesh=mesh, placements=[0]),
        TypeError,
        "expected a Placement of phalanx.tensor such as Shard(0), Replicate() or Partial(), got 0",
    ),
    "torch's placement": (
        lambda x, mesh: x.redistribute(placements=[TorchShard(0)]),
        TypeError,
        "expected a Placement of phalanx.tensor such as Shard(0), Replicate() or Partial(), got Shard(dim=0), "
        "a torch.distributed.tensor",
    ),
    "a dim that is no number": (
        lambda x, mesh: Shard("0"),
        TypeError,
        "Shard needs the number of a dim, got '0'",
    ),
    "half a dim": (lambda x, mesh: Shard(1.5), TypeError, "Shard needs the number of a dim, got 1.5"),
    "a dim too many": (
        lambda x, mesh: x.redistribute(placements=[Shard(2)]),
        IndexError,
        "S(2) is out of range for a tensor of 2 dims: expected a dim from -2 to 1",
    ),
    "an unknown reduction": (
        lambda x, mesh: Partial("mean"),
        ValueError,
        "Partial knows sum, avg, min, max, product; got 'mean'",
    ),
    # meshes
    "mesh and placements exchanged": (
        lambda x, mesh: distribute_tensor(torch.ones(4), [Shard(0)], mesh),
        TypeError,
        "expected a phalanx.comm.DeviceMesh (see init_device_mesh), got [S(0)]",
    ),
    "the shape of a mesh": (
        lambda x, mesh: DTensor.from_local(torch.ones(4), (2,), [Shard(0)]),
        TypeError,
        "expected a phalanx.comm.DeviceMesh (see init_device_mesh), got (2,)",
    ),
    "no mesh": (
        lambda x, mesh: distribute_tensor(torch.ones(4)),
        ValueError,
        "no device mesh: pass one, or enter one with `with mesh:`",
    ),
    "another mesh": (
        lambda x, mesh: x + distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1, 2))),
        ValueError,
        "add got DTensors on meshes that are not parts of one another",
    ),
    "to another mesh": (
        lambda x, mesh: x.redistribute(init_device_mesh("cpu", (1, 2)), [Replicate(), Replicate()]),
        ValueError,
        "redistribute keeps the mesh: the tensor is on",
    ),
    # data
    "a list": (
        lambda x, mesh: distribute_tensor([1.0, 2.0], mesh, [Shard(0)]),
        TypeError,
        "distribute_tensor takes a torch.Tensor, got a list: make it one with torch.as_tensor()",
    ),
    "an array": (
        lambda x, mesh: DTensor.from_local(np.ones(2), mesh, [Shard(0)]),
        TypeError,
        "from_local takes a torch.Tensor, got a ndarray: make it one with torch.as_tensor()",
    ),
    "a DTensor as a part": (
        lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)]),
        TypeError,
        "from_local takes this rank's plain tensor, got a DTensor",
    ),
    "distributed twice": (
        lambda x, mesh: distribute_tensor(x, mesh, [Shard(1)]),
        ValueError,
        "distributed already, as float32[4, 2] [tp:S(0)]: use redistribute()",
    ),
    "the result of an operation": (
        lambda x, mesh: distribute_tensor(torch.ones(4, requires_grad=True) * 2, mesh, [Shard(0)]),
        RuntimeError,
        "use DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim).redistribute(placements=...), or t.detach()",
    ),
    "a rank that is not there": (
        lambda x, mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=7),
        ValueError,
        "src=7; expected a rank in [0, 2)",
    ),
    "another shape on each rank": (
        lambda x, mesh: distribute_tensor(torch.ones(4 + mesh.get_rank()), mesh, [Shard(0)]),
        ValueError,
        "distribute_tensor got ['torch.float32[4]', 'torch.float32[5]'] on ranks [0, 1]; expected the same shape ",
    ),
    "another dtype on each rank": (
        lambda x, mesh: distribute_tensor(
            torch.ones(4, dtype=(torch.float32, torch.int32)[mesh.get_rank()]), mesh, [Replicate()]
        ),
        ValueError,
        "distribute_tensor got ['torch.float32[4]', 'torch.int32[4]'] on ranks [0, 1]",
    ),
    "parts of other widths": (
        lambda x, mesh: DTensor.from_local(torch.ones(2, 4 + mesh.get_rank()), mesh, [Shard(0)]),
        ValueError,
        "from_local got ['torch.float32[2, 4]', 'torch.float32[2, 5]'] on ranks [0, 1], but the parts of float32[4, 4] "
        "[tp:S(0)] are ['torch.float32[2, 4]', 'torch.float32[2, 4]'] on ranks [0, 1]; shards are cut as torch.chunk",
    ),
    "parts of other ranks": (
        lambda x, mesh: DTensor.from_local(torch.ones([2] * (1 + mesh.get_rank())), mesh, [Shard(0)]),
        ValueError,
        "from_local got ['torch.float32[2]', 'torch.float32[2, 2]'] on ranks [0, 1]; expected the same number of dims",
    ),
    # plain tensors beside DTensors
    "a plain operand": (
        lambda x, mesh: x @ torch.ones(2, 2),
        RuntimeError,
        "matmul got a plain tensor of shape (2, 2) (tensor argument 1) beside a DTensor, at ",
    ),
    "a plain layer": (
        lambda x, mesh: nn.Linear(2, 3)(x),
        RuntimeError,
        "linear got a plain tensor of shape (3, 2) (tensor argument 1) beside a DTensor, at ",
    ),
    "a plain target": (
        lambda x, mesh: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
        RuntimeError,
        "cross_entropy_loss got a plain tensor of shape (4,) (tensor argument 1) beside a DTensor, at ",
    ),
    "a plain index": (
        lambda x, mesh: x[torch.tensor([0, 1])],
        RuntimeError,
        "__getitem__ got a plain tensor of shape (2,) (tensor argument 1) beside a DTensor, at ",
    ),
    "a plain out": (
        lambda x, mesh: torch.add(x, x, out=torch.ones(4, 2)),
        RuntimeError,
        "out= is a plain tensor of shape (4, 2) where the arguments are DTensors: distribute it",
    ),
    "a plain gradient": (
        lambda x, mesh: (leaf(x) * 2).backward(torch.ones(4, 2)),
        RuntimeError,
        "backward of float32[4, 2] [tp:S(0)] got a plain gradient of shape (4, 2); distribute it",
    ),
    "a plain tensor as gradient": (
        lambda x, mesh: setattr(leaf(x), "grad", torch.ones(4, 2)),
        TypeError,
        "the gradient of a DTensor is a DTensor, got a plain Tensor: make it one with distribute_tensor()",
    ),
    "a plain tensor as data": (
        lambda x, mesh: setattr(x, "data", torch.ones(4, 2)),
        TypeError,
        "the data of a DTensor is a DTensor, got a plain Tensor: make it one with distribute_tensor()",
    ),
    "a collective of a group": (
        lambda x, mesh: mesh.get_group().all_reduce(x),
        TypeError,
        "all_reduce got a DTensor; expected this rank's part of it: call .to_local()",
    ),
    "a list of them in a collective": (
        lambda x, mesh: mesh.get_group().all_gather([x, x], x.to_local()),
        TypeError,
        "all_gather got a DTensor; expected this rank's part of it: call .to_local()",
    ),
    # others
    "a copied view": (
        lambda x, mesh: distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]).view(6).add_(1),
        RuntimeError,
        "add would write to a view of a DTensor that had to be copied",
    ),
    "a generator": (
        lambda x, mesh: x.uniform_(generator=torch.Generator()),
        NotImplementedError,
        "generator= on a DTensor: use phalanx.tensor.manual_seed(seed, mesh)",
    ),
    "a deep copy of a result": (
        lambda x, mesh: copy.deepcopy(leaf(x) * 2),
        RuntimeError,
        "only leaf DTensors can be deep-copied; detach() first",
    ),
    "a random function": (
        lambda x, mesh: torch.poisson(x),
        NotImplementedError,
        "poisson on a DTensor: its random numbers would differ from rank to rank; compute it of full_tensor()",
    ),
    "another shape": (
        lambda x, mesh: x.resize_(2, 2),
        NotImplementedError,
        "resize_ on a DTensor: its global shape is fixed; make a new one",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_what_the_user_reads(name: str) -> None:
    act, kind, told = SLIPS[name]

    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        with pytest.raises(kind, match=re.escape(told)):
            act(x, mesh)
        assert x.full_tensor().sum().item() == 28, "the ranks go on together"

    on_mesh(body, 2)


def test_shapes_must_agree_over_every_axis() -> None:
    """4 and 5 rows in two columns of the mesh are cut to parts of equal size on some ranks."""

    def body(mesh: Any) -> None:
        rows = 4 + mesh.get_local_rank("tp")
        for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Replicate(), Shard(0)]):
            with pytest.raises(
                ValueError,
                match=r"got \['torch.float32\[4\]', 'torch.float32\[5\]', .* on ranks \[0, 1, 2, 3\]",
            ):
                distribute_tensor(torch.ones(rows), mesh, placements)
        with pytest.raises(ValueError, match=r"from_local got .* on ranks"):
            DTensor.from_local(torch.ones(2, rows), mesh, [Replicate(), Shard(0)])
        parts = DTensor.from_local(torch.ones(2, 3 - mesh.get_local_rank("tp")), mesh, [Shard(0), Shard(1)])
        assert parts.shape == (4, 5)

    on_mesh(body, 2, 2)


def test_one_placement_is_good_for_one_axis() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.arange(4.0), mesh, Shard(0))
        assert x.placements == (Shard(0),)
        assert x.redistribute(placements=Replicate()).placements == (Replicate(),)
        assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]

    on_mesh(body, 2)


def test_comparing_with_what_is_no_tensor() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        for _ in range(2):
            assert (x == None) is False  # noqa: E711  # what is tested
            assert (x != None) is True  # noqa: E711  # what is tested
            assert (x == "S(0)") is False
        assert x not in [None, "x"]
        assert (x == 1).full_tensor().tolist() == [True] * 4

    on_mesh(body, 2)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda ps, **o: torch.optim.AdamW(ps, lr=0.1, amsgrad=True, **o),
        lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, **o),
        lambda ps, **o: torch.optim.RMSprop(ps, lr=0.1, centered=True, **o),
        lambda ps, **o: torch.optim.Adagrad(ps, lr=0.1, **o),
    ],
    ids=["AdamW", "SGD", "RMSprop", "Adagrad"],
)
def test_plain_and_distributed_parameters_in_one_optimizer(make: Any, foreach: bool) -> None:
    values = [torch.arange(6.0).view(3, 2), torch.ones(4), torch.arange(4.0)]

    def train(parameters: list[Any]) -> list[list[float]]:
        optimizer = make(parameters, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            for p in parameters:
                (p * p).sum().backward()
            optimizer.step()
        wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
        return [whole.tolist() for whole in wholes]

    def body(mesh: Any) -> list[list[float]]:
        return train(
            [
                nn.Parameter(distribute_tensor(values[0], mesh, [Shard(0)])),
                nn.Parameter(values[1].clone()),
                nn.Parameter(distribute_tensor(values[2], mesh)),
            ]
        )

    expected = train([nn.Parameter(v.clone()) for v in values])
    for found in on_mesh(body, 2):
        for ours, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(reference))


def test_a_list_function_never_mixes_kinds_at_one_place() -> None:
    def body(mesh: Any) -> None:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"_foreach_add_ got a DTensor, .*beside a plain tensor: distribute"):
            torch._foreach_add_([torch.ones(4), x], [x, x])
        with pytest.raises(RuntimeError, match=r"plain tensor of shape \(4,\) beside .*S\(0\).*: distribute it"):
            torch._foreach_add_([x], [torch.ones(4)])
        plain = torch.ones(3)
        torch._foreach_mul_([plain, x], x.sum())
        assert plain.tolist() == [4.0] * 3
        assert x.full_tensor().tolist() == [4.0] * 4

    on_mesh(body, 2)


def test_clipping_plain_and_distributed_gradients_together() -> None:
    def body(mesh: Any) -> None:
        x, y = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])), nn.Parameter(torch.zeros(5))
        x.grad, y.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(5)
        norm = nn.utils.clip_grad_norm_([x, y], 1.5)
        assert norm.item() == 3.0
        assert y.grad.tolist() == pytest.approx([0.5] * 5, rel=1e-5)
        assert x.grad.full_tensor().tolist() == pytest.approx([0.5] * 4, rel=1e-5)

    on_mesh(body, 2)


def test_a_mesh_whose_group_has_ended_is_named() -> None:
    kept: list[Any] = []

    def rank_main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        mesh.get_group().close()
        kept.append(x)
        with pytest.raises(Exception, match="closed"):
            x.full_tensor()

    comm.simulate(2).run(rank_main)
    assert len(kept) == 2
