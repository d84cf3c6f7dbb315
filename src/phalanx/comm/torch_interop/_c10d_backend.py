"""The ``phalanx`` backend of ``torch.distributed``: plain torch programs on our groups.

Owns the translation of c10d's calls to ``Group``. Blocking calls run in the caller. Those that torch starts without
waiting (its own DDP does) run one after the other in a thread, blocking calls behind them too, so that the order is the
same on every rank. send and recv have their own order and are handed to the group at once.

Continuations of a future (``then``; torch's PowerSGD hook chains three) run in that thread, and the collectives that
they start inside, there and then: right after the call that they continue, whatever else is queued by now. One that is
attached after the call is over runs in the caller; attach continuations before the next collective is started, as
hooks do, and the order is the same on every rank either way.
"""

# mypy: disable-error-code="override, assignment"
# torch's stubs overload these methods with forms that c10d does not use to call a process group.

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.group._group import Group
from phalanx.comm.stores import wrap_c10d_store
from phalanx.comm.transports._interface import ReduceOp
from phalanx.comm.transports._interface import Work as GroupWork
from phalanx.comm.transports._ordered import OrderedCalls, QueuedCall

NAME = "phalanx"

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def _op(options: Any) -> ReduceOp:
    if options is None:
        return ReduceOp.SUM
    # torch's value compares equal to a member but does not hash like it.
    for theirs, ours in _OPS.items():
        if options.reduceOp == theirs:
            return ours
    raise ValueError(f"reduction {options.reduceOp} is not known to the {NAME} backend")


def create_process_group(common: Any) -> PhalanxProcessGroup:
    """What ``torch.distributed`` calls for the backend ``phalanx`` (see ``phalanx._torch_hook``)."""
    # Torch tells its groups apart by prefixes of the store, which are lost where the store is one of ours.
    store = wrap_c10d_store(common.store).namespace(f"torch/{common.group_id}")
    group = Group.create(store, common.group_rank, common.group_size, timeout=common.timeout, job="c10d")
    return PhalanxProcessGroup(group)


class _Finished(dist.Work):
    """A call that is over, and its outputs."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class _Queued(dist.Work):
    """A call that the thread will make. Python callers get its own error, torch's C++ a future that fails."""

    def __init__(self, call: Callable[[], object], outputs: Any) -> None:
        super().__init__()
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        self.queued = _Announced(call, self._over)
        # An error that is raised in a continuation is the one way to a future that fails for C++ too.
        self._future = self._over.then(lambda _: self._outcome(outputs))

    def _outcome(self, outputs: Any) -> Any:
        self.queued.wait()
        return outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.queued.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self.queued.is_done()

    def is_success(self) -> bool:
        return self.queued.is_done() and self.queued.error is None

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Announced(QueuedCall):
    """Completes a future when it is over."""

    def __init__(self, call: Callable[[], object], over: torch.futures.Future[Any]) -> None:
        super().__init__(call)
        self._announce = over

    def run(self) -> None:
        super().run()
        self._announce.set_result(None)


class _Exchange(dist.Work):
    """A send or recv under way."""

    def __init__(self, work: GroupWork, source: int) -> None:
        super().__init__()
        self._work = work
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._work.is_done()

    def _source_rank(self) -> int:
        return self._source


class PhalanxProcessGroup(dist.ProcessGroup):
    """A c10d process group whose collectives are those of ``group``."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the stub knows one form only
        self.group = group
        self._calls = OrderedCalls("phalanx-c10d")

    def _run(self, options: Any, call: Callable[[], object], outputs: Any) -> dist.Work:
        if not getattr(options, "asyncOp", True):
            self._calls.run(call)
            return _Finished(outputs)
        work = _Queued(call, outputs)
        self._calls.submit(work.queued)
        return work

    # -- collectives, under c10d's names ------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)
        return self._run(opts, lambda: [self.group.all_reduce(t, op) for t in tensors], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        op, root = _op(opts), opts.rootRank
        return self._run(opts, lambda: [self.group.reduce(t, root, op) for t in tensors], tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank
        return self._run(opts, lambda: [self.group.broadcast(t, root) for t in tensors], tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def call() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                self.group.all_gather(parts, tensor)

        return self._run(opts, call, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def call() -> None:  # outputs[rank][i] takes rank's inputs[i]
            for i, tensor in enumerate(inputs):
                self.group.all_gather([of_rank[i] for of_rank in outputs], tensor)

        return self._run(opts, call, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self._run(opts, lambda: self.group.all_gather_into_tensor(output, tensor), output)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.group.all_gather_into_tensor(output, tensor)

        return self._run(opts, call, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        op = _op(opts)

        def call() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self.group.reduce_scatter(output, parts, op)

        return self._run(opts, call, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        op = _op(opts)
        return self._run(opts, lambda: self.group.reduce_scatter_tensor(output, tensor, op), output)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        op = _op(opts)

        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.group.reduce_scatter_tensor(output, tensor, op)

        return self._run(opts, call, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._run(opts, lambda: self.group.all_to_all(outputs, inputs), outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        def call() -> None:
            self.group.all_to_all_single(output, tensor, output_splits or None, input_splits or None)

        return self._run(opts, call, output)

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        root = opts.rootRank
        parts = outputs[0] if outputs else None
        return self._run(opts, lambda: self.group.gather(inputs[0], parts, root), outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        root = opts.rootRank
        parts = inputs[0] if inputs else None
        return self._run(opts, lambda: self.group.scatter(outputs[0], parts, root), outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run(opts, self.group.barrier, [])

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return _Exchange(self.group.send(tensors[0], dst, tag, async_op=True), self.group.rank)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return _Exchange(self.group.recv(tensors[0], src, tag, async_op=True), src)

    # -- the rest that c10d asks of a process group --------------------------------------------------------------

    def getBackendName(self) -> str:  # c10d's name for it
        return NAME

    name = getBackendName

    def shutdown(self) -> None:
        self._calls.stop()
        self.group.close()

    def abort(self) -> None:
        self._calls.stop()
        self.group.abort()
