"""CPU tensors and an accelerator's tensors take different transports; the meta device stands in for a GPU."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm import ReduceOp
from phalanx.comm._by_device import ByDeviceTransport
from phalanx.comm._shm import ShmTransport
from phalanx.comm._transport import Done
from phalanx.comm.stores import MemoryStore
from phalanx.errors import GroupAborted

pytestmark = pytest.mark.fast


class Recorder(ShmTransport):
    """A single rank that writes down what it is asked."""

    def all_reduce(self, tensor, op, *, async_op):
        self.seen = [*getattr(self, "seen", []), tensor.device.type]
        return Done()


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
