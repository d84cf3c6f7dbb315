"""What shared tensors spare (copies), what asynchronous collectives overlap with (backward), and arm64's fences."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from comm.shm.test_random import TINY, on_threads
from phalanx.comm import Group
from phalanx.comm.transports.shm import _engine, _rings, _shared_tensors, _syscalls, _window
from phalanx.ddp import DistributedDataParallel
from processes import run_processes
from shm_random import run_random

COUNT = 3000
"""Elements of each tensor: 12,000 bytes, many slots of TINY."""


def call(group: Group, kind: str, shared: bool) -> torch.Tensor:
    """One collective whose inputs are shared tensors or private ones; its result."""

    def filled(count: int) -> torch.Tensor:
        tensor = group.shared_empty((count,), torch.float32) if shared else torch.empty(count)
        return tensor.fill_(group.rank + 1.0)

    whole = filled(COUNT)
    out = torch.empty(COUNT)
    if kind == "all_reduce":
        group.all_reduce(whole)
        return whole
    if kind == "broadcast":
        group.broadcast(whole, src=1)
        return whole
    if kind == "all_gather":
        out = torch.empty(COUNT * group.size)
        group.all_gather_into_tensor(out, whole)
    elif kind == "reduce_scatter":
        out = torch.empty(COUNT // group.size)
        group.reduce_scatter_tensor(out, whole)
    else:
        group.all_to_all_single(out, whole)
    return out


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_shared_tensors_are_not_copied_into_slots(kind: str) -> None:
    def copied(shared: bool) -> tuple[int, list[torch.Tensor]]:
        sizes: list[int] = []

        def main(group: Group) -> torch.Tensor:
            window = group._transport._window
            put = window.put

            def counted(n: int, address: int, nbytes: int, offset: int = 0) -> None:
                sizes.append(nbytes)
                put(n, address, nbytes, offset)

            window.put = counted
            result = call(group, kind, shared).clone()
            group.barrier()
            del window.put
            return result

        results = on_threads(2, main, **TINY)
        return sum(sizes), results

    in_place, results = copied(shared=True)
    through_slots, expected = copied(shared=False)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert through_slots >= 4 * COUNT, "the count sees copies where there are some"
    assert in_place == 0


def reduce_during_backward(worker) -> tuple[list[str], list[int], set[str]]:
    """What happened, in order; which collectives ended, in order; and which threads ended them."""
    group = worker.group(backend="auto", timeout=60.0)
    assert group.backend == "shm"
    engine = group._transport._engine
    events, works, ended, threads = [], [], [], set()
    retire = engine._retire

    def note_and_retire(lane) -> None:
        ended.append(lane.tasks[0])
        threads.add(threading.current_thread().name)
        retire(lane)

    engine._retire = note_and_retire
    early, late = (torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(2))
    hidden = early * 2

    def start(parameter: torch.nn.Parameter) -> None:
        events.append("started")
        for part in parameter.grad.split([1 << 19, 1 << 10, (1 << 19) - (1 << 10)]):
            works.append(group.all_reduce(part, async_op=True))

    def compute(gradient: torch.Tensor) -> None:
        """The rest of backward: torch works without the interpreter lock, and nobody asks for the collectives."""
        square, ends = torch.ones(200, 200), time.monotonic() + 60
        while len(ended) < 3 and time.monotonic() < ends:
            square.mm(square)
        events.append(f"{len(ended)} ended while computing")

    late.register_post_accumulate_grad_hook(start)
    hidden.register_hook(compute)
    (hidden * late).sum().backward()
    events.append("backward over")
    del engine._retire  # what follows is not noted
    for work in works:
        work.wait()
    assert late.grad.eq(2.0 * group.size).all()
    assert early.grad.eq(2.0).all()
    group.barrier()
    return events, [works.index(task) for task in ended], threads


def test_asynchronous_collectives_run_in_order_while_backward_goes_on() -> None:
    for outcome in run_processes(2, reduce_during_backward):
        events, ended, threads = outcome.value
        assert events == ["started", "3 ended while computing", "backward over"]
        assert ended == [0, 1, 2]
        assert threads == {"phalanx-shm"}


def train_with_large_buckets(worker) -> tuple[int, bool, bool]:
    """Bytes copied into slots during one backward, where the gradient lies, and whether it is the mean."""
    group = worker.group(backend="auto", timeout=60.0)
    torch.manual_seed(0)
    net = torch.nn.Linear(1000, 1000, bias=False)
    model = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
    inputs = torch.full((4, 1000), worker.rank + 1.0)
    model(inputs).sum().backward()  # the first may still arrange its buckets
    model.zero_grad()
    window = group._transport._window
    put, sizes = window.put, []

    def counted(n: int, address: int, nbytes: int, offset: int = 0) -> None:
        sizes.append(nbytes)
        put(n, address, nbytes, offset)

    window.put = counted
    model(inputs).sum().backward()
    del window.put
    gradient = net.weight.grad
    in_place = _shared_tensors.find(gradient.data_ptr(), 4 * gradient.numel()) is not None
    group.barrier()
    return sum(sizes), in_place, bool(gradient.eq(4.0 * (group.size + 1) / 2).all())


def test_buckets_of_ddp_are_reduced_in_place() -> None:
    for outcome in run_processes(2, train_with_large_buckets):
        copied, in_place, right = outcome.value
        assert right
        assert in_place, "the gradient is a view of a bucket in shared memory"
        assert copied < 64 * 1024, f"{copied} of 4,000,000 bytes went through slots"


@pytest.mark.fast
def test_the_way_with_fences_is_right_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arm64 runs, on whatever this is: it shows that the calls are there and work, not the ordering."""
    modules = (_engine, _window, _rings)
    taken = dict.fromkeys(modules, 0)
    for module in modules:

        def fence(module=module) -> None:
            taken[module] += 1
            _syscalls._full_fence()

        monkeypatch.setattr(module, "fence", fence)
    assert on_threads(3, lambda group: run_random(group, 3, 2000, lambda n: n < 60), **TINY) == [60] * 3
    assert all(taken.values()), taken
