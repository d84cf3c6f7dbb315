"""Lets torch take a ``Group`` for one of its own process groups: c10d's calls, in terms of ours.

Owns ``TorchCalls``, which ``Group`` inherits. Blocking calls run in the caller. Those that torch starts without waiting
(its own DDP does) run one after the other in a thread, blocking calls behind them too, ours and torch's, so that the
order is the same on every rank. send and recv have their own order and are handed to the group at once.

Where a name of c10d's is also one of ours (``broadcast``, ``reduce``, ...), ours looks at what it got: c10d passes a
list where ours takes one tensor, and gets ``_torch_broadcast`` and so on.

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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store as C10dStore

from phalanx.comm.group import _torch_world
from phalanx.comm.group._checks import check_tensor, parse_op
from phalanx.comm.group._sparse_sum import sparse_sum
from phalanx.comm.group._torch_work import Exchange, Finished, Queued
from phalanx.comm.transports._interface import ReduceOp
from phalanx.comm.transports._interface import Work as GroupWork
from phalanx.comm.transports._ordered import OrderedCalls

if TYPE_CHECKING:
    from phalanx.comm.group._group import Group


class Number(int):
    """A rank or a size: an attribute with us, a method with torch.

    >>> Number(3) + 1, Number(3)()
    (4, 3)
    """

    __slots__ = ()

    def __call__(self) -> int:
        return int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def _op(options: Any) -> ReduceOp:
    """Read the reduction of a call's options; callers of the group itself pass the reduction in their place."""
    return ReduceOp.SUM if options is None else parse_op(getattr(options, "reduceOp", options))


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


def _check_is_torchs(name: str, tensors: Any, options: Any) -> None:
    """Refuse a list without c10d's options: a caller of ours, who would not wait for what was started."""
    if isinstance(tensors, list) and not hasattr(options, "asyncOp"):
        check_tensor(name, tensors)  # type: ignore[arg-type]  # and so it raises


class TorchCalls(dist.ProcessGroup):
    """Abstract: a c10d process group whose collectives are those of ``Group``, the one class that inherits it.

    Each call takes what torch's own functions pass (lists and an options value) and what callers of a process group
    may pass directly (one tensor, a reduction or a root, a timeout). What a call's work gives as its result is a flat
    list of the tensors that were written, as gloo's does.
    """

    # Slots, since attributes in the dict of a class of torch's are twice as slow to read as those of ours were.
    __slots__ = (
        "_calls",
        "_guarded",
        "_num_calls",
        "_torch_description",
        "_torch_name",
        "_torch_registered",
        "_torch_store",
        "rank",
        "size",
    )
    rank: Number
    size: Number

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub knows one form only
        self.rank = Number(rank)
        self.size = Number(size)
        self._guarded = False
        self._calls: OrderedCalls | None = None
        self._num_calls = 0
        self._torch_name = self._torch_description = ""
        self._torch_registered = False
        self._torch_store: C10dStore | None = None

    @property
    def _group(self) -> Group:
        return self  # type: ignore[return-value]  # see above: there is no other

    def _run(
        self, options: Any, call: Callable[[], object], outputs: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        self._num_calls += 1
        seconds = _seconds(options, timeout)
        calls = self._calls
        if getattr(options, "asyncOp", True) or seconds is not None:
            if calls is None:
                self._guarded = True  # ours look from now on whether torch's calls are queued
                calls = self._calls = OrderedCalls("phalanx-c10d")
            work = Queued(call, outputs)
            calls.submit(work.queued)
            if not getattr(options, "asyncOp", True):
                work.queued.wait(seconds)
            return work
        if calls is None:
            call()
        else:
            calls.run(call)
        return Finished(outputs)

    def _after_queued(self) -> None:
        """Return when what torch has queued is done; at once in the thread that does it."""
        if self._calls is not None:
            self._calls.run(lambda: None)

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
                            f"rank {self._group.rank}: all_reduce of a sparse tensor got reduction "
                            f"{reduction.value!r}; expected 'sum' (or make the tensor dense: .to_dense())"
                        )
                    tensor.copy_(sparse_sum(self._group, tensor))
                else:
                    self._group.all_reduce(tensor, reduction)

        return self._run(opts, call, listed, timeout)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce a list as if its tensors lay in one: a tensor that stands there twice is reduced once."""
        op = _op(opts)
        once = list({tensor.data_ptr(): tensor for tensor in tensors}.values())
        return self._run(opts, lambda: [self._group.all_reduce(t, op) for t in once], tensors)

    def _torch_reduce(
        self, tensors: Tensor | list[Tensor], opts: Any, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        _check_is_torchs("reduce", tensors, opts)
        listed, root = _listed(tensors), _root(opts)
        reduction = _op(opts if hasattr(opts, "reduceOp") else op)
        return self._run(opts, lambda: [self._group.reduce(t, root, reduction) for t in listed], listed, timeout)

    def _torch_broadcast(
        self, tensors: Tensor | list[Tensor], opts: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        _check_is_torchs("broadcast", tensors, opts)
        listed, root = _listed(tensors), _root(opts)
        return self._run(opts, lambda: [self._group.broadcast(t, root) for t in listed], listed, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]

        def call() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                self._group.all_gather(parts, tensor)

        return self._run(opts, call, [part for parts in outputs for part in parts], timeout)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def call() -> None:  # outputs[rank][i] takes rank's inputs[i]
            for i, tensor in enumerate(inputs):
                self._group.all_gather([of_rank[i] for of_rank in outputs], tensor)

        return self._run(opts, call, [part for parts in outputs for part in parts])

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        parts = list(output.chunk(self._group.size)) if output.dim() else [output]
        return self._run(opts, lambda: self._group.all_gather_into_tensor(output, tensor), parts, timeout)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._group.all_gather_into_tensor(output, tensor)

        return self._run(opts, call, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _torch_reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        _check_is_torchs("reduce_scatter", outputs, opts)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        reduction = _op(opts if op is None else op)

        def call() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self._group.reduce_scatter(output, parts, reduction)

        return self._run(opts, call, outputs, timeout)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        op = _op(opts)
        return self._run(opts, lambda: self._group.reduce_scatter_tensor(output, tensor, op), [output], timeout)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = _op(opts)

        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._group.reduce_scatter_tensor(output, tensor, op)

        return self._run(opts, call, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._run(opts, lambda: self._group.all_to_all(outputs, inputs), outputs)

    def _torch_all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        def call() -> None:
            self._group.all_to_all_single(output, tensor, output_splits or None, input_splits or None)

        return self._run(opts, call, [output], timeout)

    alltoall_base = _torch_all_to_all_single

    def _torch_gather(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        root = _root(opts)
        parts = list(outputs[0]) if outputs else None
        return self._run(opts, lambda: self._group.gather(inputs[0], parts, root), parts or [], timeout)

    def _torch_scatter(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> dist.Work:
        _check_is_torchs("scatter", outputs, opts)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        root = _root(opts)
        parts = inputs[0] if inputs else None
        return self._run(opts, lambda: self._group.scatter(outputs[0], parts, root), outputs, timeout)

    def _torch_barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self._run(opts, self._group.barrier, [], timeout)

    def _torch_send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        self._num_calls += 1
        return Exchange(lambda _: self._group.send(tensors[0], dst, tag, async_op=True), self._group.rank)

    def _torch_recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        self._num_calls += 1
        return Exchange(lambda _: self._group.recv(tensors[0], src, tag, async_op=True), src)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        self._num_calls += 1

        def start(work: Exchange) -> GroupWork:
            return self._group.recv_any(tensors[0], tag, arrived=work.arrived, async_op=True)

        return Exchange(start, -1)

    # -- the rest that c10d asks of a process group --------------------------------------------------------------

    # Torch keeps a group's name in the C++ backends that it holds, of which this group has none; its own meshes,
    # functional collectives and FSDP2 find a group by that name.

    def setGroupName(self, name: str) -> None:
        self._torch_name = name

    def getGroupName(self) -> str:
        """Return the name that torch finds the group by; registered with the first question."""
        if not self._torch_name:
            _torch_world.make_findable(self._group)
        return self._torch_name

    def setGroupDesc(self, text: str) -> None:
        self._torch_description = text

    def getGroupDesc(self) -> str:
        return self._torch_description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Group:
        return self._group

    def get_group_store(self) -> C10dStore | None:
        if self._torch_store is None and self._group.store is not None:
            self._torch_store = self._group.store.namespace("torch").as_c10d()
        return self._torch_store

    def _set_sequence_number_for_group(self) -> None:
        self._num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def getBackendName(self) -> str:  # c10d's name for it
        return _torch_world.BACKEND

    name = getBackendName

    def shutdown(self) -> None:
        """Close the group on behalf of torch, which then forgets it by itself."""
        self._torch_registered = False
        self._group.close()
