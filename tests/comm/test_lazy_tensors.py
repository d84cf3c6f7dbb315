"""Tensors that are not what they look like (zeros without memory, signs put off, wrappers, fakes) in every collective:
carried as their values, or refused before any byte moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.comm import simulate
from processes import run_processes

Make = Callable[[int], Tensor]


def zeros(n: int) -> Tensor:
    return torch._efficientzerotensor(n)


def full(n: int) -> Tensor:
    return torch.full((n,), 7.0)


def negative(n: int) -> Tensor:
    """-1, -2, ... as a view whose sign is yet to be changed."""
    return torch.complex(torch.zeros(n), torch.arange(1.0, n + 1)).conj().imag


# Each calls a collective on two ranks with tensors of ``given`` as inputs and of ``room`` as outputs, and returns the
# outputs; where one tensor is both, it is of ``given`` for a collective that leaves the inputs of some ranks alone.
def all_reduce(group: Any, given: Make, room: Make) -> list[Tensor]:
    tensor = room(4)
    group.all_reduce(tensor)
    return [tensor]


def reduce(group: Any, given: Make, room: Make) -> list[Tensor]:
    tensor = room(4) if group.rank == 1 else given(4)
    group.reduce(tensor, 1)
    return [tensor] if group.rank == 1 else []


def broadcast(group: Any, given: Make, room: Make) -> list[Tensor]:
    tensor = given(4) if group.rank == 0 else room(4)
    group.broadcast(tensor, 0)
    return [tensor]


def all_gather(group: Any, given: Make, room: Make) -> list[Tensor]:
    outputs = [room(4), room(4)]
    group.all_gather(outputs, given(4))
    return outputs


def all_gather_into_tensor(group: Any, given: Make, room: Make) -> list[Tensor]:
    output = room(8)
    group.all_gather_into_tensor(output, given(4))
    return [output]


def reduce_scatter(group: Any, given: Make, room: Make) -> list[Tensor]:
    output = room(4)
    group.reduce_scatter(output, [given(4), given(4)])
    return [output]


def reduce_scatter_tensor(group: Any, given: Make, room: Make) -> list[Tensor]:
    output = room(2)
    group.reduce_scatter_tensor(output, given(4))
    return [output]


def all_to_all(group: Any, given: Make, room: Make) -> list[Tensor]:
    outputs = [room(4), room(4)]
    group.all_to_all(outputs, [given(4), given(4)])
    return outputs


def all_to_all_single(group: Any, given: Make, room: Make) -> list[Tensor]:
    output = room(4)
    group.all_to_all_single(output, given(4))
    return [output]


def gather(group: Any, given: Make, room: Make) -> list[Tensor]:
    outputs = [room(4), room(4)] if group.rank == 0 else None
    group.gather(given(4), outputs, 0)
    return outputs or []


def scatter(group: Any, given: Make, room: Make) -> list[Tensor]:
    output = room(4)
    group.scatter(output, [given(4), given(4)] if group.rank == 0 else None, 0)
    return [output]


def send_and_recv(group: Any, given: Make, room: Make) -> list[Tensor]:
    tensor = given(4) if group.rank == 0 else room(4)
    if group.rank == 0:
        group.send(tensor, 1)
        return []
    group.recv(tensor, 0)
    return [tensor]


COLLECTIVES = [
    all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor,
    all_to_all, all_to_all_single, gather, scatter, send_and_recv,
]  # fmt: skip


def carried(group: Any) -> None:
    """Zeros without memory arrive as zeros, signs that were put off as they are."""
    for collective in COLLECTIVES:
        if collective is all_reduce:
            continue  # its inputs are its outputs
        for given in (zeros, negative):
            plain = collective(group, lambda n, given=given: given(n).clone(), full)
            for found, expected in zip(collective(group, given, full), plain, strict=True):
                assert torch.equal(found, expected), (collective.__name__, given.__name__, found, expected)
    signed = negative(3)
    group.all_reduce(signed)
    assert signed.tolist() == [-2.0, -4.0, -6.0]
    one = negative(1)
    group.all_reduce(one)
    assert one.tolist() == [-2.0]
    big = torch.full((4,), 1 + 2j).conj()
    group.all_reduce(big)
    assert big.tolist() == [2 - 4j] * 4


@pytest.mark.fast
def test_what_torch_put_off_is_done_before_it_travels() -> None:
    simulate(2, timeout=60.0).run(carried)


@pytest.mark.fast
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
def test_results_are_not_written_to_zeros_without_memory(collective: Any) -> None:
    def body(group: Any) -> Any:
        writes = {reduce: group.rank == 1, broadcast: group.rank == 1, gather: group.rank == 0}
        writes[send_and_recv] = group.rank == 1
        if not writes.get(collective, True):
            return None  # the other rank refuses before it moves a byte
        with pytest.raises(TypeError, match=r"ZeroTensor.*\.clone\(\)"):
            collective(group, full, zeros)
        return None

    simulate(2, timeout=60.0).run(body)


def others() -> dict[str, tuple[Tensor, str]]:
    with FakeTensorMode():
        fake = torch.ones(4)
    return {
        "meta": (torch.ones(4, device="meta"), "without data"),
        "fake": (fake, "without data"),
        "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(3)]), "nested"),
        "mkldnn": (torch.ones(4).to_mkldnn(), "layout"),
        "sparse": (torch.ones(4).to_sparse(), "layout"),
        "quantized": (torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8), "quantized"),
    }


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
def test_what_has_no_memory_is_refused(collective: Any) -> None:
    def body(group: Any) -> None:
        def refused(tensor: Tensor, says: str) -> None:
            with pytest.raises(TypeError, match=says):
                collective(group, lambda n: tensor, lambda n: tensor)

        if collective in (gather, scatter, send_and_recv) and group.rank:
            return
        for tensor, says in others().values():
            refused(tensor, says)

        def inside(x: Tensor) -> Tensor:
            refused(x, "torch.func")
            return x.sum()

        torch.func.grad(inside)(torch.ones(4))
        torch.vmap(inside)(torch.ones(2, 4))
        torch.func.functionalize(inside)(torch.ones(4))

    simulate(2, timeout=60.0).run(body)


def on_real_transports(worker: Any) -> None:
    from phalanx.comm import init_device_mesh, use_group
    from phalanx.tensor import Replicate, Shard, distribute_tensor

    for number, backend in enumerate(("gloo", "auto")):
        group = worker.group(backend=backend, generation=number)
        carried(group)
        with use_group(group):
            mesh = init_device_mesh("cpu", (2,))
            # The gradient of sgn is zeros without memory: gathered, scattered, exchanged and summed.
            for shape in [(4, 2), (5, 2)]:
                for dim in (0, 1):
                    x = distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]).requires_grad_()
                    torch.sgn(x).sum().backward()
                    assert torch.equal(x.grad.full_tensor(), torch.zeros(shape))
                    other = x.grad.redistribute(placements=[Shard(1 - dim)])
                    assert torch.equal(other.full_tensor(), torch.zeros(shape))
                    later = x.grad.redistribute(placements=[Replicate()], async_op=True)
                    assert torch.equal(later.to_local(), torch.zeros(shape))
                    # ... and on its way back through a redistribution.
                    for between in ([Replicate()], [Shard(1 - dim)]):
                        x.grad = None
                        torch.sgn(x.redistribute(placements=between)).sum().backward()
                        assert torch.equal(x.grad.full_tensor(), torch.zeros(shape))
            w = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
            x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
            torch.sgn(x * w).sum().backward()
            assert torch.equal(w.grad.full_tensor(), torch.zeros(3))
        group.close()


def test_gradients_without_memory_do_not_end_the_process() -> None:
    outcomes = run_processes(2, on_real_transports, timeout=120.0)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
