"""Carries bytes over a c10d backend (gloo, nccl, ...), torch's engine between machines.

Owns the calls, waiting, and what a failure means. Facts it rests on (torch 2.13, gloo): ``abort()`` neither wakes a
waiting thread nor closes connections; dropping the last reference to the backend and to its works closes them, which
the peers see at once, but blocks while an operation is in flight; ``wait(timeout)`` that times out harms nothing.

Guarantees: a dead peer raises ``PeerLost`` in every survivor, from the call in flight or the next one; a silent peer
raises ``PeerTimeout`` after the group's timeout; ``abort`` returns at once and wakes waiters within a slice.
How: waiting is cut into slices, between which the transport's cause of death is looked at. The first rank that fails
drops its backend (in a thread of its own, since that may block), which closes its connections, so that ranks which
wait for *it* fail too: the news runs through the group without anyone's help. When nobody is known to be dead it waits
a moment with that (``FailureDetector.give_up``), so that those whose own connection ended can tell with whom.
What is under way is in ``_c10d_work``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store as C10dStore

from phalanx.comm.failure._failure import FailureDetector
from phalanx.comm.transports import _release
from phalanx.comm.transports._c10d_work import SLICE, C10dWork, PointToPoint, Several, all_of
from phalanx.comm.transports._carried import carried, put_back
from phalanx.comm.transports._interface import Arrived, Done, ReduceOp, Transport, Work
from phalanx.comm.transports._tree_reduce import tree_reduce_into

_DONE = Done()
_GATHER_TAG = 1 << 28  # point-to-point tags of gather and scatter, out of the way of users' tags

# What gloo carries in every collective that only moves data.
_GLOO_MOVES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

_OPS: dict[ReduceOp, dist.ReduceOp.RedOpType] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}


def _options(kind: Any, op: ReduceOp, **fields: Any) -> Any:
    options = kind()
    options.reduceOp = _OPS[op]
    for name, value in fields.items():
        setattr(options, name, value)
    return options


@cache
def _broadcast_from(src: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = src
    return options


GATHER_IN_PARTS_FROM = 1 << 20
"""Bytes of a result from which gloo gathers it part by part."""

_ALL_REDUCE = {op: _options(dist.AllreduceOptions, op) for op in ReduceOp}
_REDUCE_SCATTER = {op: _options(dist.ReduceScatterOptions, op) for op in ReduceOp}


class C10dTransport(Transport):
    """Collectives on a c10d ``Backend`` or ``ProcessGroup``; ``failures`` tells what an error means.

    ``store`` is what the engine was made with (torch does not keep one written in Python alive), or None for an
    engine that belongs to the user, which is then left open at the end.
    """

    def __init__(
        self, engine: Any, name: str, timeout: float, failures: FailureDetector, *, store: C10dStore | None
    ) -> None:
        self.name = name
        self.rank = engine.rank()
        self.size = engine.size()
        self._engine = engine
        self._store = store
        self._sliced = name == "gloo"
        self._timeout = timeout
        self._failures = failures
        self._pending: weakref.WeakSet[C10dWork] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._num_gathers = 0
        self._dead_since: float | None = None
        failures.start(self._peer_died)

    # -- collectives ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        if not tensor.numel():
            return self._nothing()
        staged = carried(tensor, op) if self._sliced else None
        if staged is not None:
            args = ([staged], _ALL_REDUCE[op])
            return self._start("allreduce", args, async_op, after=lambda: put_back(tensor, staged))
        return self._start("allreduce", ([tensor], _ALL_REDUCE[op]), async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        if not tensor.numel():
            return self._nothing()
        options = _options(dist.ReduceOptions, op, rootRank=dst)
        staged = carried(tensor, op) if self._sliced else None
        if staged is not None:
            finish = (lambda: put_back(tensor, staged)) if self.rank == dst else None
            return self._start("reduce", ([staged], options), async_op, after=finish)
        # gloo uses the other ranks' tensors as scratch space, hence the copy.
        scratch = tensor if self.rank == dst else tensor.clone()
        return self._start("reduce", ([scratch], options), async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        if not tensor.numel():
            return self._nothing()
        return self._start("broadcast", ([self._bytes(tensor)], _broadcast_from(src)), async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        sizes = [output.numel() for output in outputs]
        if not any(sizes):
            return self._nothing()
        if self._sliced and sum(sizes) * tensor.element_size() >= GATHER_IN_PARTS_FROM:
            return self._gather_in_parts([self._bytes(output) for output in outputs], self._bytes(tensor), async_op)
        if min(sizes) == max(sizes):
            parts = [self._bytes(output).view(-1) for output in outputs]
            return self._start("allgather", ([parts], [self._bytes(tensor).view(-1)]), async_op)
        # Uneven: gloo wants one size, so everybody sends the largest.
        longest = max(sizes)
        sent = tensor.new_empty(longest)
        sent[: tensor.numel()] = tensor.view(-1)
        padded = tensor.new_empty(self.size * longest)
        args = (self._bytes(padded), self._bytes(sent))

        def unpack() -> None:
            for rank, output in enumerate(outputs):
                output.view(-1).copy_(padded[rank * longest : rank * longest + output.numel()])

        return self._start("_allgather_base", args, async_op, after=unpack)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        if self._sliced and output.dtype not in _GLOO_MOVES:
            output, tensor = self._bytes(output), self._bytes(tensor)
        if self._sliced and output.numel() * output.element_size() >= GATHER_IN_PARTS_FROM:
            return self._gather_in_parts(output.view(-1).chunk(self.size), tensor, async_op)
        if output.dim() != 1 or tensor.dim() != 1:
            shape, part = output.shape, tensor.shape
            if not part or 0 in part or shape[1:] != part[1:] or shape[0] != part[0] * self.size:
                output, tensor = output.view(-1), tensor.view(-1)
        return self._start("_allgather_base", (output, tensor), async_op)

    def _gather_in_parts(self, parts: Sequence[Tensor], tensor: Tensor, async_op: bool) -> Work:
        """Send each rank's part from there to its place: gloo's own gather goes through a copy of the whole result."""
        own = parts[self.rank]
        own.copy_(tensor.view(own.shape))
        works = [
            self._start("broadcast", ([part], _broadcast_from(src)), True)
            for src, part in enumerate(parts)
            if part.numel()
        ]
        return all_of(works, async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        sizes = [part.numel() for part in inputs]
        if not any(sizes):
            return self._nothing()
        flat = [part.reshape(-1) for part in inputs]
        if self._sliced or min(sizes) == max(sizes):
            run = _one_run(flat)
            whole = torch.cat(flat) if run is None else run
            if self._sliced:
                return self._exchange_and_reduce(output, whole, op, async_op, sizes)
            return self.reduce_scatter_tensor(output, whole, op, async_op=async_op)
        # Uneven: one all-reduce over parts laid end to end, which every backend has.
        whole = torch.cat(flat)
        start = sum(sizes[: self.rank])
        own = whole[start : start + sizes[self.rank]]
        work = Several([self.all_reduce(whole, op, async_op=async_op)], lambda: output.view(-1).copy_(own))
        if not async_op:
            work.wait()
        return work

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        if self._sliced:
            return self._exchange_and_reduce(output, tensor.view(-1), op, async_op)
        if output.dim() != 1 or tensor.dim() != 1:
            output, tensor = output.view(-1), tensor.view(-1)
        return self._start("_reduce_scatter_base", (output, tensor, _REDUCE_SCATTER[op]), async_op)

    def _exchange_and_reduce(
        self, output: Tensor, flat: Tensor, op: ReduceOp, async_op: bool, sizes: Sequence[int] = ()
    ) -> Work:
        """Send each rank what it reduces, and nothing else: gloo's own reduces all of it on every rank.

        ``sizes`` of the parts of ``flat``; without, they are even. Whoever waits reduces, along the tree of the other
        transports.
        """
        count = output.numel()
        received = flat.new_empty(self.size * count)

        def reduce() -> None:
            tree_reduce_into(output.view(-1), received.split(count) if count else [output.view(-1)], op)

        if not flat.numel():
            return self._nothing()
        sent, room = self._bytes(flat), self._bytes(received)
        width = sent.numel() // flat.numel()
        outgoing, incoming = [size * width for size in sizes], [count * width] * self.size if sizes else []
        return self._start("alltoall_base", (room, sent, incoming, outgoing), async_op, after=reduce)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        # The flat form carries uneven parts on every backend; the list form does not.
        given = [self._bytes(part).view(-1) for part in inputs]
        wanted = [self._bytes(output).view(-1) for output in outputs]
        in_splits, out_splits = [part.numel() for part in given], [part.numel() for part in wanted]
        sent, received = _one_run(given), _one_run(wanted)
        if sent is None:
            sent = torch.cat(given)
        if received is not None:
            return self._start("alltoall_base", (received, sent, out_splits, in_splits), async_op)
        room = sent.new_empty(sum(out_splits))

        def unpack() -> None:
            for output, part in zip(wanted, torch.split(room, out_splits), strict=True):
                output.copy_(part)

        return self._start("alltoall_base", (room, sent, out_splits, in_splits), async_op, after=unpack)

    def all_to_all_flat(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        # without splits it cuts the first dim, whatever the others are
        return self._start("alltoall_base", (self._bytes(output), self._bytes(tensor), [], []), async_op)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        """Point to point, so that sizes may differ without the others knowing them."""
        tag = self._next_gather_tag()
        if self.rank != dst:
            return self.send(tensor, dst, tag, async_op=async_op)
        assert outputs is not None, "Group passes outputs on dst"
        outputs[dst].copy_(tensor)
        works = [self.recv(outputs[r], r, tag, async_op=True) for r in range(self.size) if r != dst]
        return all_of(works, async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        tag = self._next_gather_tag()
        if self.rank != src:
            return self.recv(output, src, tag, async_op=async_op)
        assert inputs is not None, "Group passes inputs on src"
        output.copy_(inputs[src])
        works = [self.send(inputs[r], r, tag, async_op=True) for r in range(self.size) if r != src]
        return all_of(works, async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        return self._start("send", ([self._bytes(tensor)], dst, tag), async_op, direct=True)

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        return self._start("recv", ([self._bytes(tensor)], src, tag), async_op, direct=True)

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        work = self._start("recv_anysource", ([self._bytes(tensor)], tag), True, direct=True)
        assert isinstance(work, C10dWork), "an operation under way"
        work.arrived = arrived
        if not async_op:
            work.wait()
        return work

    def barrier(self, *, async_op: bool) -> Work:
        return self._start("barrier", (), async_op)

    def _bytes(self, tensor: Tensor) -> Tensor:
        """Return what only moves may travel as bytes where the backend does not know its dtype."""
        if self._sliced and tensor.dtype not in _GLOO_MOVES:
            return tensor.view(-1).view(torch.uint8)
        return tensor

    def _next_gather_tag(self) -> int:
        self._num_gathers += 1
        return _GATHER_TAG + self._num_gathers % _GATHER_TAG

    # -- starting, waiting, failing ---------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        args: tuple[Any, ...],
        async_op: bool,
        after: Callable[[], object] | None = None,
        direct: bool = False,
    ) -> Work:
        """Issue the engine's operation ``name``; ``after`` runs when it is done. ``direct``: from rank to rank."""
        if self._failures.cause is not None or self._dead_since is not None:
            self._check_alive()
        inner = None
        try:
            inner = getattr(self._engine, name)(*args)
            if not (async_op or direct):  # the common case needs no handle
                if self._sliced:
                    inner.wait(SLICE)
                else:
                    inner.wait()
                if after is not None:
                    after()
                return _DONE
        except RuntimeError as error:
            if inner is None:
                if not self._failures.is_fault(error):
                    raise
                raise self._fail(error) from error
            error.__traceback__ = None  # see C10dWork.wait
        work = C10dWork(self, PointToPoint(inner) if self._sliced and direct else inner, after)
        inner = None
        if async_op:
            self._pending.add(work)
        else:
            work.wait()
        return work

    def _nothing(self) -> Work:
        self._check_alive()
        return _DONE

    def _check_alive(self) -> None:
        cause = self._failures.cause
        if cause is None and self._dead_since is not None:
            cause = self._fail(None)
        if cause is not None:
            raise cause

    def _peer_died(self) -> None:
        self._dead_since = time.monotonic()

    def _fail(self, error: BaseException | None) -> BaseException:
        """Settle why the group ended (once) and let go of the connections."""
        cause = self._failures.settle(error)
        self._release(self._failures.give_up if getattr(cause, "suspects", ()) else None)
        return cause

    def abort(self, cause: BaseException) -> None:
        self._failures.settle_as(cause)
        self._release()

    def close(self) -> None:
        self._release()

    def _release(self, before: Callable[[], None] | None = None) -> None:
        with self._lock:
            holder = [self._engine, *(work.detach() for work in self._pending), self._store]
            self._engine = None
        self._failures.stop()
        if holder[0] is not None and self._store is not None:
            _release.drop(holder, before)


def _one_run(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the flat parts as one tensor without a copy, if they lie end to end in one memory; empty ones do not
    count."""
    filled = [part for part in parts if part.numel()]
    if len(filled) < 2:
        return filled[0] if filled else parts[0]
    begin, storage = filled[0].storage_offset(), filled[0].untyped_storage().data_ptr()
    end = begin
    for part in filled:
        if part.storage_offset() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.numel()
    return filled[0].as_strided((end - begin,), (1,), begin)
