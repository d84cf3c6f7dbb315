"""Puts one transport for CPU tensors and another for those of an accelerator behind one interface.

Owns the dispatch by the device of the first tensor. The accelerator's transport is connected when it is first needed:
all ranks call the same collectives in the same order, so they connect together. barrier is the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.comm.transports._interface import Arrived, ReduceOp, Transport, Work


class ByDeviceTransport(Transport):
    """``cpu`` carries everything but tensors on ``device_type``, for which ``connect`` makes the transport."""

    def __init__(self, cpu: Transport, device_type: str, connect: Callable[[], Transport]) -> None:
        self.name, self.rank, self.size = cpu.name, cpu.rank, cpu.size
        self._cpu = cpu
        self._device_type = device_type
        self._connect = connect
        self._other: Transport | None = None
        self._ended: BaseException | None = None

    def _for(self, tensor: Tensor) -> Transport:
        if tensor.device.type != self._device_type:
            return self._cpu
        if self._ended is not None:
            raise self._ended
        if self._other is None:
            self._other = self._connect()
        return self._other

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self._for(tensor).all_reduce(tensor, op, async_op=async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        return self._for(tensor).reduce(tensor, op, dst, async_op=async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        return self._for(tensor).broadcast(tensor, src, async_op=async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        return self._for(tensor).all_gather(outputs, tensor, async_op=async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        return self._for(tensor).all_gather_into_tensor(output, tensor, async_op=async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        return self._for(output).reduce_scatter(output, inputs, op, async_op=async_op)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self._for(output).reduce_scatter_tensor(output, tensor, op, async_op=async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        return self._for(inputs[0]).all_to_all(outputs, inputs, async_op=async_op)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        return self._for(tensor).gather(outputs, tensor, dst, async_op=async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        return self._for(output).scatter(output, inputs, src, async_op=async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        return self._for(tensor).send(tensor, dst, tag, async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        return self._for(tensor).recv(tensor, src, tag, async_op=async_op)

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        return self._for(tensor).recv_any(tensor, tag, arrived, async_op=async_op)

    def barrier(self, *, async_op: bool) -> Work:
        return self._cpu.barrier(async_op=async_op)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._cpu.shared_empty(shape, dtype)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._cpu.dead_ranks()

    def abort(self, cause: BaseException) -> None:
        self._ended = cause
        self._cpu.abort(cause)
        if self._other is not None:
            self._other.abort(cause)

    def close(self) -> None:
        self._cpu.close()
        if self._other is not None:
            self._other.close()
