"""Carries collectives of ranks that are known by number before they meet, and that may meet again in other company.

Owns ``Relay``: a transport of a fixed rank and size on which meshes and tensors are built at once; whoever forms groups
later binds it to the transport of the day (``bind``), as often as groups form anew. What to do when a rank is lost in
the middle of a call is the binder's decision (``RelayDriver``): the error goes on to the caller, or the call's results
are zeros and the caller, who computes something that nobody will use, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from phalanx.comm.transports._interface import Arrived, Done, ReduceOp, Transport, Work
from phalanx.errors import CommError


class RelayDriver(Protocol):
    """Decides about losses in the calls of a relay."""

    def check_group(self) -> None:
        """Raise if the group is known to be lost."""

    def survives_call(self, error: CommError) -> bool:
        """Return whether a call that was cut short by ``error`` goes on with zeros."""

    def waits(self, is_waiting: bool) -> None:
        """Return whether this rank waits for others from here on."""


class _RelayedWork(Work):
    def __init__(self, work: Work, end: Callable[[CommError], None]) -> None:
        self._work: Work | None = work
        self._end = end

    def wait(self, timeout: float | None = None) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait(timeout)
        except CommError as error:
            self._end(error)

    def is_done(self) -> bool:
        return self._work is None or self._work.is_done()


class Relay(Transport):
    """One rank's end of a group that is bound later."""

    name = "relay"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._bound: tuple[Transport, RelayDriver] | None = None

    def bind(self, transport: Transport, driver: RelayDriver) -> None:
        """Carry calls by ``transport`` from now on."""
        assert (transport.rank, transport.size) == (self.rank, self.size), (
            f"rank {transport.rank} of {transport.size} for a relay of rank {self.rank} of {self.size}"
        )
        self._bound = transport, driver

    def unbind(self) -> None:
        """Be in no group."""
        self._bound = None

    def _carry(self, written: Sequence[Tensor], call: Callable[[Transport], Work], *, async_op: bool) -> Work:
        if self._bound is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} is in no group yet: the workers of a job's mesh come together when "
                "its first step is asked for. Before that nothing can be sent on it: give parallelize_module and "
                "distribute_tensor src_data_rank=None, so that each worker cuts its own copy"
            )
        transport, driver = self._bound

        def end(error: CommError) -> None:
            if not driver.survives_call(error):
                raise error
            for tensor in written:
                tensor.zero_()

        driver.waits(True)
        try:
            driver.check_group()
            work = call(transport)
        except CommError as error:
            end(error)
            return Done()
        finally:
            driver.waits(False)
        return _RelayedWork(work, end) if async_op else work

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self._carry([tensor], lambda t: t.all_reduce(tensor, op, async_op=async_op), async_op=async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        written = [tensor] if self.rank == dst else []
        return self._carry(written, lambda t: t.reduce(tensor, op, dst, async_op=async_op), async_op=async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        written = [tensor] if self.rank != src else []
        return self._carry(written, lambda t: t.broadcast(tensor, src, async_op=async_op), async_op=async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        return self._carry(outputs, lambda t: t.all_gather(outputs, tensor, async_op=async_op), async_op=async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        return self._carry(
            [output], lambda t: t.all_gather_into_tensor(output, tensor, async_op=async_op), async_op=async_op
        )

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        return self._carry(
            [output], lambda t: t.reduce_scatter(output, inputs, op, async_op=async_op), async_op=async_op
        )

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self._carry(
            [output], lambda t: t.reduce_scatter_tensor(output, tensor, op, async_op=async_op), async_op=async_op
        )

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        return self._carry(outputs, lambda t: t.all_to_all(outputs, inputs, async_op=async_op), async_op=async_op)

    def all_to_all_flat(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        return self._carry([output], lambda t: t.all_to_all_flat(output, tensor, async_op=async_op), async_op=async_op)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        return self._carry(
            outputs or (), lambda t: t.gather(outputs, tensor, dst, async_op=async_op), async_op=async_op
        )

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        return self._carry([output], lambda t: t.scatter(output, inputs, src, async_op=async_op), async_op=async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        return self._carry((), lambda t: t.send(tensor, dst, tag, async_op=async_op), async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        return self._carry([tensor], lambda t: t.recv(tensor, src, tag, async_op=async_op), async_op=async_op)

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        return self._carry([tensor], lambda t: t.recv_any(tensor, tag, arrived, async_op=async_op), async_op=async_op)

    def barrier(self, *, async_op: bool) -> Work:
        return self._carry((), lambda t: t.barrier(async_op=async_op), async_op=async_op)

    def abort(self, cause: BaseException) -> None:
        self.unbind()

    def close(self) -> None:
        self.unbind()
