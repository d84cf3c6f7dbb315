"""CPU tensors and an accelerator's tensors take different transports."""

from __future__ import annotations

import logging

import pytest
import torch

from comm.shm.test_random import TINY, on_threads
from devices import late
from phalanx._devices import of
from phalanx.comm import Group, ReduceOp
from phalanx.comm.stores import MemoryStore
from phalanx.comm.transports import _auto
from phalanx.comm.transports._by_device import ByDeviceTransport
from phalanx.comm.transports._interface import Done
from phalanx.comm.transports.shm._transport import ShmTransport
from phalanx.errors import GroupAborted
from processes import run_processes


class Recorder(ShmTransport):
    """A single rank that writes down what it is asked."""

    def all_reduce(self, tensor, op, *, async_op):
        self.seen = [*getattr(self, "seen", []), tensor.device.type]
        return Done()


@pytest.mark.fast
def test_each_device_has_its_transport_and_the_second_is_made_when_needed() -> None:
    made: list[Recorder] = []

    def connect() -> Recorder:
        made.append(Recorder.create(MemoryStore(), 0, 1))
        return made[0]

    cpu = Recorder.create(MemoryStore(), 0, 1)
    both = ByDeviceTransport(cpu, "meta", connect)
    both.all_reduce(torch.ones(1), ReduceOp.SUM, async_op=False)
    assert not made
    for _ in range(2):
        both.all_reduce(torch.ones(1, device="meta"), ReduceOp.SUM, async_op=False)
    assert (cpu.seen, len(made), made[0].seen) == (["cpu"], 1, ["meta", "meta"])
    output = torch.empty(2)
    both.all_gather([output], torch.tensor([1.0, 2.0]), async_op=False)
    assert output.tolist() == [1.0, 2.0]
    both.abort(GroupAborted("over"))
    for transport in (cpu, made[0]):
        with pytest.raises(GroupAborted, match="over"):
            transport.barrier(async_op=False)
    both.close()


@pytest.mark.fast
def test_cuda_tensors_take_nccl_and_the_rest_goes_through_the_host() -> None:
    assert _auto.choose_for(of("cuda"), ["nccl"]).kind == "nccl"
    assert _auto.choose_for(of("cuda"), []).kind == "staged"
    assert _auto.choose_for(of("xpu"), ["nccl"]).kind == "staged"


def meet_on_two_devices(worker) -> tuple[str, float, list[float], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda item: lines.append(item.getMessage())
    logging.getLogger("phalanx.comm").addHandler(handler)
    logging.getLogger("phalanx.comm").setLevel(logging.INFO)
    late.install()
    group = worker.group(backend="auto", timeout=60.0)
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    foreign = torch.ones(3, device="late")
    group.all_reduce(foreign)
    return group.backend, tensor[0].item(), foreign.tolist(), lines


def test_an_accelerators_tensors_go_another_way_and_the_log_says_which() -> None:
    outcomes = run_processes(2, meet_on_two_devices)
    for outcome in outcomes:
        assert outcome.value[:3] == ("shm", 2.0, [2.0, 2.0, 2.0])
    first, second = (outcome.value[3] for outcome in outcomes)
    assert len(first) == 2
    assert "staged for tensors on late, since late has no backend of its own here" in first[1]
    assert second == [], "one rank speaks for all"


@pytest.mark.fast
def test_tensors_that_are_not_in_the_hosts_memory_are_refused() -> None:
    def main(group: Group) -> int:
        good, bad = torch.ones(4), torch.ones(4, device="meta")
        calls = [
            lambda: group.all_reduce(bad),
            lambda: group.reduce(bad, 0),
            lambda: group.broadcast(bad, 0),
            lambda: group.all_gather([good, bad], good),
            lambda: group.all_gather_into_tensor(torch.ones(8, device="meta"), good),
            lambda: group.reduce_scatter(good, [good, bad]),
            lambda: group.reduce_scatter_tensor(good, torch.ones(8, device="meta")),
            lambda: group.all_to_all([good, bad], [good, good]),
            lambda: group.all_to_all_single(good, bad),
            lambda: group.gather(bad, [good, good] if group.rank == 0 else None, 0),
            lambda: group.scatter(bad, [good, good] if group.rank == 0 else None, 0),
            lambda: group.send(bad, 1 - group.rank),
            lambda: group.recv(bad, 1 - group.rank),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="got a tensor on meta"):
                call()
        group.all_reduce(good)
        return int(good.sum())

    assert on_threads(2, main, **TINY) == [8, 8]
