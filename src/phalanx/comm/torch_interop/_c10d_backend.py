"""Runs plain torch programs on our groups: the ``phalanx`` backend of ``torch.distributed``.

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
from torch.distributed import Store as C10dStore

from phalanx.comm.group._group import Group
from phalanx.comm.group._sparse_sum import sparse_sum
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
    """Read the reduction of a call's options; callers of the group itself pass the reduction in their place."""
    if options is None:
        return ReduceOp.SUM
    wanted = getattr(options, "reduceOp", options)
    # torch's value compares equal to a member but does not hash like it.
    for theirs, ours in _OPS.items():
        if wanted == theirs:
            return ours
    raise ValueError(f"reduction {wanted} is not known to the {NAME} backend")


def _root(options: Any) -> int:
    """Read the root rank of a call's options; callers of the group itself pass the rank in their place."""
    return int(getattr(options, "rootRank", options))


def _seconds(options: Any, timeout: timedelta | None) -> float | None:
    """Read how long a call may take, or None where it says nothing and the group's own limit holds."""
    timeout = timeout if timeout is not None else getattr(options, "timeout", None)
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None  # torch writes "not set" as minus a millisecond


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def create_process_group(common: Any) -> PhalanxProcessGroup:
    """Return what ``torch.distributed`` calls for the backend ``phalanx`` (see ``phalanx._torch_hook``)."""
    # Torch tells its groups apart by prefixes of the store, which are lost where the store is one of ours.
    store = wrap_c10d_store(common.store).namespace(f"torch/{common.group_id}")
    group = Group.create(store, common.group_rank, common.group_size, timeout=common.timeout, job="c10d")
    return PhalanxProcessGroup(group, common.store)


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

    def result(self) -> Any:
        return self._future.value()

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
    """A send or recv under way; ``source`` is -1 until it is known."""

    def __init__(self, start: Callable[[_Exchange], GroupWork], source: int) -> None:
        super().__init__()
        self.source = source
        self._work = start(self)

    def arrived(self, source: int) -> None:
        self.source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._work.is_done()

    def _source_rank(self) -> int:
        return self.source


class PhalanxProcessGroup(dist.ProcessGroup):
    """A c10d process group whose collectives are those of ``group``.

    Each call takes what torch's own functions pass (lists and an options value) and what callers of a process group
    may pass directly (one tensor, a reduction or a root, a timeout). What a call's work gives as its result is a flat
    list of the tensors that were written, as gloo's does.
    """

    def __init__(self, group: Group, store: C10dStore | None = None) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the stub knows one form only
        self.group = group
        self._store = store
        self._name = self._description = ""
        self._num_calls = 0
        self._calls = OrderedCalls("phalanx-c10d")

    def _run(
        self, options: Any, call: Callable[[], object], outputs: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        self._num_calls += 1
        seconds = _seconds(options, timeout)
        if getattr(options, "asyncOp", True) or seconds is not None:
            work = _Queued(call, outputs)
            self._calls.submit(work.queued)
            if not getattr(options, "asyncOp", True):
                work.queued.wait(seconds)
            return work
        self._calls.run(call)
        return _Finished(outputs)

    # -- collectives, under c10d's names ------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensor | list[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        listed, reduction = _listed(tensors), _op(opts if op is None else op)

        def call() -> None:
            for tensor in listed:
                if tensor.layout is torch.sparse_coo:
                    if reduction is not ReduceOp.SUM:
                        raise ValueError(
                            f"rank {self.group.rank}: all_reduce of a sparse tensor got reduction "
                            f"{reduction.value!r}; expected 'sum' (or make the tensor dense: .to_dense())"
                        )
                    tensor.copy_(sparse_sum(self.group, tensor))
                else:
                    self.group.all_reduce(tensor, reduction)

        return self._run(opts, call, listed, timeout)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce a list as if its tensors lay in one: a tensor that stands there twice is reduced once."""
        op = _op(opts)
        once = list({tensor.data_ptr(): tensor for tensor in tensors}.values())
        return self._run(opts, lambda: [self.group.all_reduce(t, op) for t in once], tensors)

    def reduce(
        self, tensors: Tensor | list[Tensor], opts: Any, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        listed, root = _listed(tensors), _root(opts)
        reduction = _op(opts if hasattr(opts, "reduceOp") else op)
        return self._run(opts, lambda: [self.group.reduce(t, root, reduction) for t in listed], listed, timeout)

    def broadcast(self, tensors: Tensor | list[Tensor], opts: Any, timeout: timedelta | None = None) -> dist.Work:
        listed, root = _listed(tensors), _root(opts)
        return self._run(opts, lambda: [self.group.broadcast(t, root) for t in listed], listed, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]

        def call() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                self.group.all_gather(parts, tensor)

        return self._run(opts, call, [part for parts in outputs for part in parts], timeout)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def call() -> None:  # outputs[rank][i] takes rank's inputs[i]
            for i, tensor in enumerate(inputs):
                self.group.all_gather([of_rank[i] for of_rank in outputs], tensor)

        return self._run(opts, call, [part for parts in outputs for part in parts])

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        parts = list(output.chunk(self.group.size)) if output.dim() else [output]
        return self._run(opts, lambda: self.group.all_gather_into_tensor(output, tensor), parts, timeout)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.group.all_gather_into_tensor(output, tensor)

        return self._run(opts, call, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        reduction = _op(opts if op is None else op)

        def call() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self.group.reduce_scatter(output, parts, reduction)

        return self._run(opts, call, outputs, timeout)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        op = _op(opts)
        return self._run(opts, lambda: self.group.reduce_scatter_tensor(output, tensor, op), [output], timeout)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = _op(opts)

        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.group.reduce_scatter_tensor(output, tensor, op)

        return self._run(opts, call, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run(opts, lambda: self.group.all_to_all(outputs, inputs), outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        def call() -> None:
            self.group.all_to_all_single(output, tensor, output_splits or None, input_splits or None)

        return self._run(opts, call, [output], timeout)

    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = _root(opts)
        parts = list(outputs[0]) if outputs else None
        return self._run(opts, lambda: self.group.gather(inputs[0], parts, root), parts or [], timeout)

    def scatter(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = _root(opts)
        parts = inputs[0] if inputs else None
        return self._run(opts, lambda: self.group.scatter(outputs[0], parts, root), outputs, timeout)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self._run(opts, self.group.barrier, [], timeout)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        self._num_calls += 1
        return _Exchange(lambda _: self.group.send(tensors[0], dst, tag, async_op=True), self.group.rank)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        self._num_calls += 1
        return _Exchange(lambda _: self.group.recv(tensors[0], src, tag, async_op=True), src)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        self._num_calls += 1

        def start(work: _Exchange) -> GroupWork:
            return self.group.recv_any(tensors[0], tag, arrived=work.arrived, async_op=True)

        return _Exchange(start, -1)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; ``PeerTimeout`` names those that did not come, all of them either way.

        ``torch.distributed.monitored_barrier`` itself refuses every backend that is not called gloo: call this method
        of the group (``dist.group.WORLD.monitored_barrier()``).
        """
        self._num_calls += 1
        self._calls.run(lambda: self.group.monitored_barrier(_seconds(None, timeout)))

    # -- the rest that c10d asks of a process group --------------------------------------------------------------

    # Torch keeps a group's name in the C++ backends that it holds, of which this group has none; its own meshes,
    # functional collectives and FSDP2 find a group by that name.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PhalanxProcessGroup:
        return self

    def get_group_store(self) -> C10dStore | None:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def getBackendName(self) -> str:  # c10d's name for it
        return NAME

    name = getBackendName

    def shutdown(self) -> None:
        self._calls.stop()
        self.group.close()

    def abort(self) -> None:
        self._calls.stop()
        self.group.abort()
