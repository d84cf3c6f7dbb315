"""Collectives of a group: the one place that every one of them passes through.

Owns a short way for the tensors that nearly every call brings, checks (``_checks``) and contiguous copies
(``_staging``) for the others; before each, observers are told (``_observe``) and the ranks compared if asked
(``PHALANX_DEBUG=collectives``). A ``Transport`` carries the bytes. Ranks in the arguments are ranks of this group.

Names that c10d has too take what torch passes under them as well (see ``_torch_calls``): a list in place of the tensor,
or an options value, or a timeout.

Invariants: a collective calls ``_enter`` once, after its checks and before the transport (the short ways ask first
whether it has anything to do); what torch has queued on the group is done before.
"""

# mypy: disable-error-code="override, return-value, arg-type"
# torch's stubs overload these methods with forms that c10d does not use; what torch calls gets torch's works.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from phalanx._devices import device_of_engine, is_host
from phalanx.comm.failure._mismatch import CallChecker
from phalanx.comm.group import _json_values, _observe
from phalanx.comm.group._checks import (
    MOVED,
    PLAIN,
    STRIDED,
    TENSORS,
    check_flat,
    check_list,
    check_others,
    check_peer,
    check_rank,
    check_same_shape,
    check_tensor,
    equal_parts,
    is_plain,
    parse_op,
    reducible,
    shard_dtype,
    split_parts,
)
from phalanx.comm.group._staging import copy_back, settled
from phalanx.comm.group._torch_calls import TorchCalls
from phalanx.comm.transports._interface import Arrived, ReduceOp, Transport, Work

POINT_TO_POINT = frozenset({"send", "recv"})  # in an order of their own
Limit = timedelta | None


class Collectives(TorchCalls):
    """Abstract: what ranks of a group do together."""

    __slots__ = ("_checker", "_ended", "_transport")

    def __init__(self, transport: Transport, checker: CallChecker | None) -> None:
        super().__init__(transport.rank, transport.size)
        self._transport = transport
        self._checker = checker
        self._guarded = checker is not None
        self._ended: BaseException | None = None

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "sum", *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by the reduction over all ranks."""
        try:
            plain = PLAIN[op][tensor.dtype] if type(tensor) in TENSORS and tensor.data_ptr() else None
        except (KeyError, TypeError, RuntimeError):
            plain = None
        if (
            plain is not None
            and tensor.layout is STRIDED
            and tensor.is_contiguous()
            and not tensor.is_nested
            and (tensor.numel() != 1 or not tensor.is_neg())
        ):
            if self._guarded or _observe._observers:
                self._enter("all_reduce", (tensor,), plain)
            return self._transport.all_reduce(tensor, plain, async_op=async_op)
        check_tensor("all_reduce", tensor, written=True)
        staged = settled(tensor)
        view, kind = reducible("all_reduce", staged, parse_op(op))
        self._enter("all_reduce", (tensor,), kind)
        work = self._transport.all_reduce(view, kind, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp | str = "sum", timeout: Limit = None, *, async_op: bool = False
    ) -> Work:
        """Like ``all_reduce``, but only ``dst`` gets the result; the others' tensors stay as they are."""
        if timeout is not None or isinstance(tensor, list):
            return self._torch_reduce(tensor, dst, op, timeout)
        check_rank(self, "reduce", "dst", dst)
        check_tensor("reduce", tensor, written=self.rank == dst)
        staged = settled(tensor)
        view, kind = reducible("reduce", staged, parse_op(op))
        self._enter("reduce", (tensor,), kind, root=dst)
        work = self._transport.reduce(view, kind, dst, async_op=async_op)
        return copy_back(work, [(tensor, staged)] if self.rank == dst else [], async_op)

    def broadcast(self, tensor: Tensor, src: int, timeout: Limit = None, *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by that of ``src``."""
        if timeout is not None or isinstance(tensor, list):
            return self._torch_broadcast(tensor, src, timeout)
        check_rank(self, "broadcast", "src", src)
        if is_plain(tensor):
            if self._guarded or _observe._observers:
                self._enter("broadcast", (tensor,), root=src)
            return self._transport.broadcast(tensor, src, async_op=async_op)
        check_tensor("broadcast", tensor, written=self.rank != src)
        staged = settled(tensor)
        self._enter("broadcast", (tensor,), root=src)
        work = self._transport.broadcast(staged, src, async_op=async_op)
        return copy_back(work, [(tensor, staged)] if self.rank != src else [], async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool = False) -> Work:
        """``outputs[r]`` becomes rank r's tensor; shapes may differ from rank to rank."""
        check_tensor("all_gather", tensor)
        check_list(self, "all_gather", "outputs", outputs, like=tensor, written=True)
        check_same_shape(self, "all_gather", "outputs", outputs[self.rank], tensor)
        staged = [settled(output) for output in outputs]
        self._enter("all_gather", (outputs,))
        work = self._transport.all_gather(staged, settled(tensor), async_op=async_op)
        return copy_back(work, list(zip(outputs, staged, strict=True)), async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        """``output`` becomes the ranks' tensors, one after the other; all have one shape."""
        if shard_dtype(self.size, output, tensor) in MOVED:
            if self._guarded or _observe._observers:
                self._enter("all_gather_into_tensor", (output,))
            return self._transport.all_gather_into_tensor(output, tensor, async_op=async_op)
        check_flat(self, "all_gather_into_tensor", output, tensor, written=output)
        staged = settled(output)
        self._enter("all_gather_into_tensor", (output,))
        work = self._transport.all_gather_into_tensor(staged, settled(tensor), async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp | str = "sum",
        timeout: Limit = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """``output`` becomes the reduction of all ranks' ``inputs[rank]``; shapes may differ from rank to rank."""
        if timeout is not None or isinstance(output, list):
            return self._torch_reduce_scatter(output, inputs, op, timeout)
        check_tensor("reduce_scatter", output, written=True)
        check_list(self, "reduce_scatter", "inputs", inputs, like=output)
        check_same_shape(self, "reduce_scatter", "inputs", inputs[self.rank], output)
        parsed = parse_op(op)
        staged = settled(output)
        view, kind = reducible("reduce_scatter", staged, parsed)
        parts = [reducible("reduce_scatter", settled(part), parsed)[0] for part in inputs]
        self._enter("reduce_scatter", (inputs,), kind)
        work = self._transport.reduce_scatter(view, parts, kind, async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        tensor: Tensor,
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
    ) -> Work:
        """``tensor`` holds one equal part per rank; ``output`` becomes the reduction of this rank's part."""
        carry = self._transport.reduce_scatter_tensor
        try:
            plain = PLAIN[op][shard_dtype(self.size, tensor, output)]
        except (KeyError, TypeError):
            plain = None
        if plain is not None:
            if self._guarded or _observe._observers:
                self._enter("reduce_scatter_tensor", (tensor,), plain)
            return carry(output, tensor, plain, async_op=async_op)
        check_flat(self, "reduce_scatter_tensor", tensor, output, written=output)
        parsed = parse_op(op)
        staged = settled(output)
        view, kind = reducible("reduce_scatter_tensor", staged, parsed)
        source, _ = reducible("reduce_scatter_tensor", settled(tensor), parsed)
        self._enter("reduce_scatter_tensor", (tensor,), kind)
        work = carry(view, source, kind, async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool = False) -> Work:
        """``inputs[r]`` goes to rank r, ``outputs[r]`` comes from it; shapes may all differ."""
        check_list(self, "all_to_all", "inputs", inputs, like=inputs[0] if inputs else None)
        check_list(self, "all_to_all", "outputs", outputs, like=inputs[0], written=True)
        staged = [settled(output) for output in outputs]
        sent = [settled(tensor) for tensor in inputs]
        self._enter("all_to_all", (outputs, inputs))
        work = self._transport.all_to_all(staged, sent, async_op=async_op)
        return copy_back(work, list(zip(outputs, staged, strict=True)), async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Limit = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """``all_to_all`` on parts of dim 0; without splits the parts are equal."""
        if opts is not None or timeout is not None:
            return self._torch_all_to_all_single(output, tensor, output_splits or (), input_splits or (), opts, timeout)
        if output_splits is None and input_splits is None and equal_parts(self.size, output, tensor):
            if self._guarded or _observe._observers:
                self._enter("all_to_all_single", (output, tensor))
            return self._transport.all_to_all_flat(output, tensor, async_op=async_op)
        check_tensor("all_to_all_single", output, written=True)
        check_tensor("all_to_all_single", tensor)
        staged = settled(output)
        received = split_parts(self, "all_to_all_single", "output_splits", staged, output_splits)
        sent = split_parts(self, "all_to_all_single", "input_splits", settled(tensor), input_splits)
        self._enter("all_to_all_single", (output, tensor))
        work = self._transport.all_to_all(received, sent, async_op=async_op)
        return work if staged is output else copy_back(work, [(output, staged)], async_op)

    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None,
        dst: int,
        timeout: Limit = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """On ``dst``, ``outputs[r]`` becomes rank r's tensor; the other ranks pass None."""
        if timeout is not None or isinstance(tensor, list):
            return self._torch_gather(tensor, outputs, dst, timeout)
        check_rank(self, "gather", "dst", dst)
        check_tensor("gather", tensor)
        if self.rank == dst:
            check_list(self, "gather", "outputs", outputs, like=tensor, written=True)
            check_same_shape(self, "gather", "outputs", (outputs or ())[self.rank], tensor)
        wanted = list(outputs or ()) if self.rank == dst else []
        staged = [settled(output) for output in wanted]
        self._enter("gather", (tensor, wanted), root=dst)
        work = self._transport.gather(staged if self.rank == dst else None, settled(tensor), dst, async_op=async_op)
        return copy_back(work, list(zip(wanted, staged, strict=True)), async_op)

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        src: int,
        timeout: Limit = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """``output`` becomes ``src``'s ``inputs[rank]``; the other ranks pass None."""
        if timeout is not None or isinstance(output, list):
            return self._torch_scatter(output, inputs, src, timeout)
        check_rank(self, "scatter", "src", src)
        check_tensor("scatter", output, written=True)
        if self.rank == src:
            check_list(self, "scatter", "inputs", inputs, like=output)
            check_same_shape(self, "scatter", "inputs", (inputs or ())[self.rank], output)
        given = [settled(tensor) for tensor in inputs or ()] if self.rank == src else []
        staged = settled(output)
        self._enter("scatter", (output, given), root=src)
        work = self._transport.scatter(staged, given if self.rank == src else None, src, async_op=async_op)
        return work if staged is output else copy_back(work, [(output, staged)], async_op)

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Send to one rank; it must ``recv`` the same size with the same tag."""
        if isinstance(tensor, list):
            return self._torch_send(tensor, dst, tag)
        check_peer(self, "send", "dst", dst)
        check_tensor("send", tensor)
        self._enter("send", (tensor,), root=dst)
        return self._transport.send(settled(tensor), dst, tag, async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Receive from one rank into ``tensor``."""
        if isinstance(tensor, list):
            return self._torch_recv(tensor, src, tag)
        check_peer(self, "recv", "src", src)
        check_tensor("recv", tensor, written=True)
        staged = settled(tensor)
        self._enter("recv", (tensor,), root=src)
        work = self._transport.recv(staged, src, tag, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def recv_any(self, tensor: Tensor, tag: int = 0, *, arrived: Arrived = int, async_op: bool = False) -> Work:
        """Receive from whichever rank sends first with this tag; ``arrived`` is called with its rank."""
        check_others(self, "recv_any")
        check_tensor("recv", tensor, written=True)
        staged = settled(tensor)
        self._enter("recv", (tensor,))
        work = self._transport.recv_any(staged, tag, arrived, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def barrier(self, opts: Any = None, timeout: Limit = None, *, async_op: bool = False) -> Work:
        """Return when every rank has called it."""
        if opts is not None or timeout is not None:
            return self._torch_barrier(opts, timeout)
        if self._guarded or _observe._observers:
            self._enter("barrier", ())
        return self._transport.barrier(async_op=async_op)

    # -- values and memory ---------------------------------------------------------------------------------------

    def broadcast_value(self, value: Any, src: int = 0) -> Any:
        """``src``'s value on every rank. The value is JSON: None, bool, numbers, text, lists, dicts with text keys."""
        return _json_values.broadcast_value(self._group, value, src)

    def all_gather_values(self, value: Any) -> list[Any]:
        """Return every rank's value (JSON), in the order of the ranks."""
        return _json_values.all_gather_values(self._group, value)

    def tell(self, words: Sequence[int]) -> list[list[int]] | None:
        """Return every rank's ``words``, a few integers, for ranks to see that they are about to do the same.

        None, and nothing is sent, where the transport finds that out by itself, or carries no tensors of the host.
        Observers do not see it: it belongs to the collective that comes next.
        """
        transport = self._transport
        if self.size == 1 or transport.compares_calls or not is_host(device_of_engine(transport.name)):
            return None
        if self._ended is not None:
            raise self._ended
        if self._calls is not None:
            self._after_queued()
        own = torch.tensor(words)
        told = torch.empty(self.size * len(words), dtype=torch.int64)
        transport.all_gather_into_tensor(told, own, async_op=False)
        rows: list[list[int]] = told.view(self.size, -1).tolist()
        return rows

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor in memory that collectives of this group can use without copying it first."""
        return self._transport.shared_empty(shape, dtype)

    # -- the one place ----------------------------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        sides: Sequence[Tensor | Sequence[Tensor]],
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Do what precedes every collective: is the group alive, who looks, do the ranks agree."""
        if self._ended is not None:
            raise self._ended
        if self._calls is not None and name not in POINT_TO_POINT:
            self._after_queued()
        if _observe._observers:
            _observe.emit(self._group, name, sides, "" if op is None else op.value)
        if self._checker is not None:
            self._checker.check(name, sides, "" if op is None else op.value, root)
