"""Carries an accelerator's tensors through the host's memory, on the transport that carries the host's own.

For kinds of devices that have no c10d backend here: gloo refuses their tensors. Owns the copies and the waiting.

Plan of every call:
1. what this rank gives is copied to memory that the device writes by itself (pinned), on the current stream, so after
   all that was computed before;
2. this thread waits until the device is there, and only then begins the host's collective;
3. when that is done (``wait``), what this rank gets is copied back, on the stream that is current then: whatever is
   computed on it afterwards sees the result. Nobody waits for that copy; the memory is torch's to keep until then.

Guarantees: those of the host's transport, same bits included. Rejected: beginning the collective when somebody waits
for it, which would not block in the call, but lets ranks that wait in another order meet in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx._devices import Device
from phalanx.comm.transports._interface import Arrived, ReduceOp, Transport, Work

_Pair = tuple[Tensor, Tensor]


class CopyBackWork(Work):
    """The host's collective under way, what it reads (``held``), and what is to be copied back when it is done."""

    def __init__(self, inner: Work, back: Sequence[_Pair], held: Sequence[Tensor]) -> None:
        self._inner = inner
        self._back = back
        self._held = held

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        back, self._back, self._held = self._back, (), ()
        for tensor, there in back:
            tensor.copy_(there, non_blocking=True)

    def is_done(self) -> bool:
        return self._inner.is_done()


class StagedTransport(Transport):
    """``host`` carries what tensors of ``device`` hold. Closing and aborting is the owner of ``host``'s business."""

    def __init__(self, host: Transport, device: Device) -> None:
        self.name, self.rank, self.size = host.name, host.rank, host.size
        self._host = host
        self._device = device

    def _room(self, tensor: Tensor) -> Tensor:
        return self._device.host_buffer(tensor.shape, tensor.dtype)

    def _given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the tensors hold, in the host's memory and there when this returns (1 and 2 of the plan)."""
        copies = [self._room(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
        self._device.mark().wait()
        return copies

    def _ended(self, begun: Work, back: Sequence[_Pair], async_op: bool, held: Sequence[Tensor] = ()) -> Work:
        """Return the host's collective with what is to be copied back; copied, if nobody is going to wait."""
        work = CopyBackWork(begun, back, held)
        if not async_op:
            work.wait()
        return work

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        (there,) = self._given([tensor])
        return self._ended(self._host.all_reduce(there, op, async_op=async_op), [(tensor, there)], async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        (there,) = self._given([tensor])
        back = [(tensor, there)] if self.rank == dst else []
        return self._ended(self._host.reduce(there, op, dst, async_op=async_op), back, async_op, [there])

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        if self.rank == src:
            (there,) = self._given([tensor])
            back = []
        else:
            there = self._room(tensor)
            back = [(tensor, there)]
        return self._ended(self._host.broadcast(there, src, async_op=async_op), back, async_op, [there])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        (given,) = self._given([tensor])
        rooms = [self._room(output) for output in outputs]
        back = list(zip(outputs, rooms, strict=True))
        return self._ended(self._host.all_gather(rooms, given, async_op=async_op), back, async_op, [given])

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        (given,), room = self._given([tensor]), self._room(output)
        work = self._host.all_gather_into_tensor(room, given, async_op=async_op)
        return self._ended(work, [(output, room)], async_op, [given])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        given, room = self._given(inputs), self._room(output)
        work = self._host.reduce_scatter(room, given, op, async_op=async_op)
        return self._ended(work, [(output, room)], async_op, given)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        (given,), room = self._given([tensor]), self._room(output)
        work = self._host.reduce_scatter_tensor(room, given, op, async_op=async_op)
        return self._ended(work, [(output, room)], async_op, [given])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        given, rooms = self._given(inputs), [self._room(output) for output in outputs]
        back = list(zip(outputs, rooms, strict=True))
        return self._ended(self._host.all_to_all(rooms, given, async_op=async_op), back, async_op, given)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        (given,) = self._given([tensor])
        rooms = None if outputs is None else [self._room(output) for output in outputs]
        back = list(zip(outputs or (), rooms or (), strict=True))
        return self._ended(self._host.gather(rooms, given, dst, async_op=async_op), back, async_op, [given])

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        given = None if inputs is None else self._given(inputs)
        room = self._room(output)
        return self._ended(
            self._host.scatter(room, given, src, async_op=async_op), [(output, room)], async_op, given or ()
        )

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        (given,) = self._given([tensor])
        return self._ended(self._host.send(given, dst, tag, async_op=async_op), [], async_op, [given])

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        room = self._room(tensor)
        return self._ended(self._host.recv(room, src, tag, async_op=async_op), [(tensor, room)], async_op)

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        room = self._room(tensor)
        work = self._host.recv_any(room, tag, arrived, async_op=async_op)
        return self._ended(work, [(tensor, room)], async_op)

    def barrier(self, *, async_op: bool) -> Work:
        self._device.mark().wait()
        return self._host.barrier(async_op=async_op)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._host.shared_empty(shape, dtype)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._host.dead_ranks()

    def abort(self, cause: BaseException) -> None:
        return

    def close(self) -> None:
        return
