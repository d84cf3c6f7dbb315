"""Results have the order in memory that they have on one device: what copies and what shares memory follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import on_mesh, whole

from phalanx.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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
            mark = ours.made._copied_view
            if mark is not None and mark.base is None:  # data was moved, and no way leads back
                assert ours.seen._spec.has_thin_shard, told
                with pytest.raises(RuntimeError, match="would not reach its base"):
                    ours.made.add_(5)
                continue
            for x in (plain, ours):
                x.made.add_(5)
            torch.testing.assert_close(whole(ours.seen), plain.seen, msg=told)
            torch.testing.assert_close(whole(ours.made), plain.made, msg=told)

    on_mesh(body, 2)


LAYOUTS = [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()], [Partial()]]
MADE: dict[str, Callable[[Any], Any]] = {
    "element by element": lambda x: torch.exp(x) * x,
    "an input moved": lambda x: x + _moved(x),
    "moved for a flip": lambda x: x.flip(0),
    "computed whole": lambda x: torch.heaviside(x, x),
    "sorted": lambda x: x.sort(0).values,
    "random, alike": torch.rand_like,
    "whole numbers, alike": lambda x: torch.randint_like(x, 5),
    "alike, row-major": lambda x: torch.randn_like(x, memory_format=torch.contiguous_format),
    "a slice of it": lambda x: x[1:].relu(),
    "expanded": lambda x: x[:1].expand(3, -1, -1).relu(),
    "normalised": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "its last dims normalised": lambda x: torch.nn.functional.rms_norm(x, x.shape[1:]),
}


def _moved(x: Any) -> Any:
    """The same elsewhere, as the operation's other input."""
    dims = [p for p in getattr(x, "placements", ()) if p.is_shard()]
    return x.redistribute(placements=[Shard((dims[0].dim + 1) % 3)]) if dims else x


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_have_the_strides_that_they_have_on_one_device(made: str, placements: list[Any], ranks: int) -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(60.0).reshape(3, 5, 4)
        ours = distribute_tensor(
            plain, mesh, [Replicate() if p.is_partial() else p for p in placements], src_data_rank=None
        ).redistribute(placements=placements)
        for order in itertools.permutations(range(3)):
            found, expected = (MADE[made](x.permute(order)) for x in (ours, plain))
            assert found.stride() == expected.stride(), order
            assert found.is_contiguous() == expected.is_contiguous(), order

    on_mesh(body, ranks)


def test_other_memory_formats_are_those_of_the_whole() -> None:
    def body(mesh: Any) -> None:
        plain = torch.zeros(2, 2, 3, 3)
        ours = distribute_tensor(plain, mesh, [Shard(1)])  # a part has one channel: it has either format
        for x in (ours, ours.relu(), ours.clone()):
            assert not x.is_contiguous(memory_format=torch.channels_last)
        assert ours.to(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)

    on_mesh(body, 2)


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.relu, torch.sigmoid, torch.sqrt])
def test_gradients_of_single_rows_whose_order_was_told(function: Any) -> None:
    def body(mesh: Any) -> None:
        plain = torch.arange(1.0, 9.0).reshape(2, 4).requires_grad_()
        ours = distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]).requires_grad_()
        for x in (plain, ours):
            y = function(x.t())
            (y * function(y)).sum().backward()
            z = function(x.t())
            z.mul_(2)
        torch.testing.assert_close(whole(ours.grad), plain.grad)

    on_mesh(body, 2)


def test_a_tensor_moved_by_the_user_is_row_major_on_every_rank() -> None:
    def body(mesh: Any) -> None:
        part = DTensor.from_local(torch.arange(8.0).reshape(4, 2), mesh, [Partial()])
        assert part.redistribute(placements=[Shard(1)]).stride() == (2, 1)
        cut = distribute_tensor(torch.zeros(2, 1, 4), mesh, [Shard(0)])
        assert cut.redistribute(placements=[Shard(2)]).is_contiguous()
        assert cut.redistribute(placements=[Replicate()]).is_contiguous()

    on_mesh(body, 2)
