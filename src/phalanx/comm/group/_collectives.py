"""The collectives as callers see them: which arguments they take, and how unusual tensors travel.

Owns argument checks, the short way for the tensors that nearly every call brings, the views under which odd dtypes
travel, and staging of non-contiguous tensors. The bytes are carried by a ``Transport``; whether the group still lives
and who looks on is ``Group``'s (``_group``), which these methods become part of by inheritance: a second object would
cost every call one more lookup.

Invariant: a collective calls ``_enter`` once, after its checks and before the transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.group import _observe
from phalanx.comm.group._checks import (
    MOVED,
    PLAIN,
    check_flat,
    check_list,
    check_peer,
    check_rank,
    check_same_shape,
    check_tensor,
    parse_op,
    reducible,
    split_parts,
)
from phalanx.comm.group._staging import copy_back, settled
from phalanx.comm.transports._interface import ReduceOp, Transport, Work

_TENSORS = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
# The short ways are for tensors that have an address (``data_ptr``); ``check_tensor`` says what those without one are.
# They ask for a sign that torch put off (``is_neg``) only where there is one element: such tensors are
# imaginary parts of conjugated ones, every other element in memory, so that with more they are not contiguous.


class Collectives:
    """Abstract: what moves tensors between the ranks of a ``Group``."""

    rank: int
    size: int
    _transport: Transport
    _guarded: bool
    """Whether ``_enter`` has more to do than to tell observers; the short ways ask before they call it."""

    def _enter(
        self,
        name: str,
        sides: Sequence[Tensor | Sequence[Tensor]],
        op: ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """What precedes every collective."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "sum", *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by the reduction over all ranks."""
        try:
            plain = PLAIN[op][tensor.dtype] if type(tensor) in _TENSORS and tensor.data_ptr() else None
        except (KeyError, TypeError, RuntimeError):
            plain = None
        if (
            plain is not None
            and tensor.layout is _STRIDED
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

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp | str = "sum", *, async_op: bool = False) -> Work:
        """Like ``all_reduce``, but only ``dst`` gets the result; the others' tensors stay as they are."""
        check_rank(self, "reduce", "dst", dst)
        check_tensor("reduce", tensor, written=self.rank == dst)
        staged = settled(tensor)
        view, kind = reducible("reduce", staged, parse_op(op))
        self._enter("reduce", (tensor,), kind, root=dst)
        work = self._transport.reduce(view, kind, dst, async_op=async_op)
        return copy_back(work, [(tensor, staged)] if self.rank == dst else [], async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Work:
        """Replace ``tensor`` on every rank by that of ``src``."""
        check_rank(self, "broadcast", "src", src)
        if _is_plain(tensor):
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
        if self._fitting(output, tensor) in MOVED:
            if self._guarded or _observe._observers:
                self._enter("all_gather_into_tensor", (output,))
            return self._transport.all_gather_into_tensor(output, tensor, async_op=async_op)
        check_flat(self, "all_gather_into_tensor", output, tensor, written=output)
        staged = settled(output)
        self._enter("all_gather_into_tensor", (output,))
        work = self._transport.all_gather_into_tensor(staged, settled(tensor), async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp | str = "sum", *, async_op: bool = False
    ) -> Work:
        """``output`` becomes the reduction of all ranks' ``inputs[rank]``; shapes may differ from rank to rank."""
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
        self, output: Tensor, tensor: Tensor, op: ReduceOp | str = "sum", *, async_op: bool = False
    ) -> Work:
        """``tensor`` holds one equal part per rank; ``output`` becomes the reduction of this rank's part."""
        try:
            plain = PLAIN[op][self._fitting(tensor, output)]
        except (KeyError, TypeError):
            plain = None
        if plain is not None:
            if self._guarded or _observe._observers:
                self._enter("reduce_scatter_tensor", (tensor,), plain)
            return self._transport.reduce_scatter_tensor(output, tensor, plain, async_op=async_op)
        check_flat(self, "reduce_scatter_tensor", tensor, output, written=output)
        parsed = parse_op(op)
        staged = settled(output)
        view, kind = reducible("reduce_scatter_tensor", staged, parsed)
        source, _ = reducible("reduce_scatter_tensor", settled(tensor), parsed)
        self._enter("reduce_scatter_tensor", (tensor,), kind)
        work = self._transport.reduce_scatter_tensor(view, source, kind, async_op=async_op)
        return copy_back(work, [(output, staged)], async_op)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool = False
    ) -> Work:
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
        *,
        async_op: bool = False,
    ) -> Work:
        """``all_to_all`` on parts of dim 0; without splits the parts are equal."""
        if output_splits is None and input_splits is None and self._halves_fit(output, tensor):
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
        self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, *, async_op: bool = False
    ) -> Work:
        """On ``dst``, ``outputs[r]`` becomes rank r's tensor; the other ranks pass None."""
        check_rank(self, "gather", "dst", dst)
        check_tensor("gather", tensor)
        if self.rank == dst:
            check_list(self, "gather", "outputs", outputs, like=tensor, written=True)
            check_same_shape(self, "gather", "outputs", (outputs or ())[self.rank], tensor)
        wanted = list(outputs or ()) if self.rank == dst else []
        staged = [settled(output) for output in wanted]
        self._enter("gather", (tensor, wanted), root=dst)
        work = self._transport.gather(
            staged if self.rank == dst else None, settled(tensor), dst, async_op=async_op
        )
        return copy_back(work, list(zip(wanted, staged, strict=True)), async_op)

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool = False
    ) -> Work:
        """``output`` becomes ``src``'s ``inputs[rank]``; the other ranks pass None."""
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
        check_peer(self, "send", "dst", dst)
        check_tensor("send", tensor)
        self._enter("send", (tensor,), root=dst)
        return self._transport.send(settled(tensor), dst, tag, async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Receive from one rank into ``tensor``."""
        check_peer(self, "recv", "src", src)
        check_tensor("recv", tensor, written=True)
        staged = settled(tensor)
        self._enter("recv", (tensor,), root=src)
        work = self._transport.recv(staged, src, tag, async_op=async_op)
        return copy_back(work, [(tensor, staged)], async_op)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Return when every rank has called it."""
        if self._guarded or _observe._observers:
            self._enter("barrier", ())
        return self._transport.barrier(async_op=async_op)

    def _fitting(self, whole: Tensor, part: Tensor) -> torch.dtype | None:
        """The dtype if ``whole`` is one ``part`` per rank and both can travel as they are, as nearly always."""
        if type(whole) in _TENSORS and type(part) in _TENSORS:
            dtype, count = whole.dtype, part.numel()
            try:
                if (
                    part.dtype is dtype
                    and whole.is_contiguous()
                    and part.is_contiguous()
                    and whole.numel() == count * self.size
                    and whole.layout is _STRIDED
                    and part.layout is _STRIDED
                    and whole.data_ptr()
                    and part.data_ptr()
                    and not (whole.is_nested or part.is_nested)
                    and (count != 1 or not (whole.is_neg() or part.is_neg()))
                ):
                    return dtype
            except (
                RuntimeError
            ):  # from data_ptr, which some tensors have not, or is_contiguous, on sparse layouts
                pass
        return None

    def _halves_fit(self, output: Tensor, tensor: Tensor) -> bool:
        """Whether both are equal parts, one per rank, of tensors that can travel as they are."""
        return (
            _is_plain(output)
            and _is_plain(tensor)
            and output.dtype is tensor.dtype
            and output.shape == tensor.shape
            and output.numel() > 0
            and output.dim() > 0
            and output.shape[0] % self.size == 0
        )


def _is_plain(tensor: Tensor) -> bool:
    try:
        return (
            type(tensor) in _TENSORS
            and tensor.layout is _STRIDED
            and tensor.dtype in MOVED
            and tensor.data_ptr() != 0
            and tensor.is_contiguous()
            and not tensor.is_nested
            and (tensor.numel() != 1 or not tensor.is_neg())
        )
    except RuntimeError:  # from data_ptr: inside a transform of torch.func
        return False
