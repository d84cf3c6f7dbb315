"""Carries tensors between ranks in threads of one process: whoever comes last does the work for all.

Owns the meeting points (``Board``, one per group) and what each collective computes there; reductions follow the
fixed tree of ``_tree_reduce``. Since the last rank sees everybody's arguments, mismatched calls are found for free and
reported as ``CollectiveMismatch``. A dead rank gives ``PeerLost``, a hung one ``PeerTimeout``, as real ones do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.failure._mismatch import signature
from phalanx.comm.simulation._scheduler import Released, Scheduler
from phalanx.comm.transports._interface import Arrived, Done, ReduceOp, Transport, Work
from phalanx.comm.transports._tree_reduce import tree_reduce
from phalanx.errors import CollectiveMismatch, PeerLost, PeerTimeout

_DONE = Done()
Meet = Callable[[list[Any]], None]


@dataclass
class _SimulatedCall:
    """One collective: what each rank brought, and whether it is done."""

    brought: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    done: bool = False
    mismatch: str = ""


@dataclass
class Board:
    """Where the ranks of one simulated group meet. Touched only by the rank whose turn it is."""

    scheduler: Scheduler
    ranks: tuple[int, ...]
    """The ranks of the simulation that belong to the group."""
    generation: int = 0
    meetings: dict[int, _SimulatedCall] = field(default_factory=dict)
    mail: dict[tuple[int, int, int], deque[Tensor]] = field(default_factory=dict)

    def fault(self, rank: int) -> BaseException | None:
        """Why the group cannot go on, as ``rank`` would be told."""
        if self.scheduler.all_well:
            return None
        dead = tuple(i for i, r in enumerate(self.ranks) if self.scheduler.is_dead(r))
        if dead:
            return PeerLost(
                f"rank {rank}: rank {', '.join(map(str, dead))} of generation {self.generation} died; "
                f"regroup without it",
                generation=self.generation,
                ranks=dead,
            )
        hung = tuple(i for i, r in enumerate(self.ranks) if self.scheduler.is_hung(r))
        if hung:
            return PeerTimeout(
                f"rank {rank}: rank {', '.join(map(str, hung))} of generation {self.generation} hangs",
                generation=self.generation,
                ranks=hung,
            )
        return None


class ThreadTransport(Transport):
    """One rank's end of a ``Board``."""

    name = "threads"
    compares_calls = True

    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.size = len(board.ranks)
        self._board = board
        self._count = 0
        self._num_posted = 0
        self._posted: dict[tuple[int, int], deque[tuple[int, Tensor]]] = {}
        """Where receives that are under way write to, by source and tag, in their order."""
        self._ended: BaseException | None = None

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        def meet(tensors: list[Tensor]) -> None:
            result = tree_reduce(tensors, op)
            for each in tensors:
                each.copy_(result)

        return self._meet(signature("all_reduce", [tensor], op.value), tensor, meet, async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        def meet(tensors: list[Tensor]) -> None:
            tensors[dst].copy_(tree_reduce(tensors, op))

        return self._meet(signature("reduce", [tensor], op.value, dst), tensor, meet, async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        def meet(tensors: list[Tensor]) -> None:
            for rank, each in enumerate(tensors):
                if rank != src:
                    each.copy_(tensors[src])

        return self._meet(signature("broadcast", [tensor], "", src), tensor, meet, async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Sequence[Tensor], Tensor]]) -> None:
            sent = [own.clone() for _, own in brought]
            for receiver, (outs, _) in enumerate(brought):
                for rank, (out, part) in enumerate(zip(outs, sent, strict=True)):
                    _deliver("all_gather", out, part, rank, receiver)

        return self._meet(signature("all_gather", [tensor], ""), (outputs, tensor), meet, async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([own.reshape(-1) for _, own in brought])
            for out, _ in brought:
                out.view(-1).copy_(whole)

        call = signature("all_gather_into_tensor", [tensor], "")
        return self._meet(call, (output, tensor), meet, async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Tensor, Sequence[Tensor]]]) -> None:
            parts = [[inp[rank] for _, inp in brought] for rank in range(len(brought))]
            for receiver, each in enumerate(parts):
                for rank, part in enumerate(each):
                    if part.numel() != brought[receiver][0].numel():
                        raise _size_error("reduce_scatter", brought[receiver][0], part, rank, receiver)
            results = [tree_reduce(each, op) for each in parts]
            for (out, _), result in zip(brought, results, strict=True):
                out.copy_(result.view(out.shape))

        call = signature("reduce_scatter", [output], op.value)
        return self._meet(call, (output, inputs), meet, async_op)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Tensor, Tensor]]) -> None:
            result = tree_reduce([whole.view(-1) for _, whole in brought], op)
            for (out, _), part in zip(brought, result.chunk(len(brought)), strict=True):
                out.view(-1).copy_(part)

        call = signature("reduce_scatter_tensor", [tensor], op.value)
        if not tensor.numel():
            return self._meet(call, None, _nothing, async_op)
        return self._meet(call, (output, tensor), meet, async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            sent = [[part.clone() for part in inp] for _, inp in brought]
            for receiver, (outs, _) in enumerate(brought):
                for rank, out in enumerate(outs):
                    _deliver("all_to_all", out, sent[rank][receiver], rank, receiver)

        return self._meet(signature("all_to_all", inputs, ""), (outputs, inputs), meet, async_op)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Sequence[Tensor] | None, Tensor]]) -> None:
            outs = brought[dst][0]
            assert outs is not None, "Group passes outputs on dst"
            for rank, (out, (_, part)) in enumerate(zip(outs, brought, strict=True)):
                _deliver("gather", out, part, rank, dst)

        return self._meet(signature("gather", [tensor], "", dst), (outputs, tensor), meet, async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        def meet(brought: list[tuple[Tensor, Sequence[Tensor] | None]]) -> None:
            parts = brought[src][1]
            assert parts is not None, "Group passes inputs on src"
            for receiver, ((out, _), part) in enumerate(zip(brought, parts, strict=True)):
                _deliver("scatter", out, part, src, receiver)

        return self._meet(signature("scatter", [output], "", src), (output, inputs), meet, async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        self._check_alive()
        self._board.mail.setdefault((self.rank, dst, tag), deque()).append(tensor.clone())
        return _DONE

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        self._check_alive()
        box = self._board.mail.setdefault((src, self.rank, tag), deque())
        posted = self._posted.setdefault((src, tag), deque())
        number = self._num_posted = self._num_posted + 1
        posted.append((number, tensor))

        def is_due() -> bool:
            return sum(earlier <= number for earlier, _ in posted) <= len(box)

        def finish() -> None:
            while posted and posted[0][0] <= number:  # earlier receives get earlier messages, whoever waits first
                _deliver("recv", posted.popleft()[1], box.popleft(), src, self.rank)

        work = _ThreadWork(self, is_due, f"a message from rank {src} with tag {tag}", finish)
        if not async_op:
            work.wait()
        return work

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        self._check_alive()
        others = [rank for rank in range(self.size) if rank != self.rank]
        boxes = {src: self._board.mail.setdefault((src, self.rank, tag), deque()) for src in others}

        def finish() -> None:
            src = next(src for src, box in boxes.items() if box)
            _deliver("recv", tensor, boxes[src].popleft(), src, self.rank)
            arrived(src)

        work = _ThreadWork(self, lambda: any(boxes.values()), f"a message from any rank with tag {tag}", finish)
        if not async_op:
            work.wait()
        return work

    def barrier(self, *, async_op: bool) -> Work:
        return self._meet("barrier()", None, _nothing, async_op)

    def abort(self, cause: BaseException) -> None:
        self._ended = self._ended or cause

    def close(self) -> None:
        return

    def _meet(self, call: str, bring: Any, meet: Meet, async_op: bool) -> Work:
        self._check_alive()
        board, number = self._board, self._count
        self._count += 1
        meeting = board.meetings.setdefault(number, _SimulatedCall())
        meeting.brought[self.rank], meeting.calls[self.rank] = bring, call
        if len(meeting.brought) == self.size:
            del board.meetings[number]
            self._hold(meeting, meet)
        elif (fault := board.fault(self.rank)) is not None:
            raise fault
        missing = f"ranks {[r for r in range(self.size) if r not in meeting.brought]} of {list(board.ranks)}"
        work = _ThreadWork(self, lambda: meeting.done, f"{call} (number {number}) of {missing}", None, meeting)
        if not async_op:
            work.wait()
        return work

    def _hold(self, meeting: _SimulatedCall, meet: Meet) -> None:
        meeting.done = True
        if len(set(meeting.calls.values())) > 1:
            table = "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(meeting.calls.items()))
            meeting.mismatch = f"the ranks called different collectives:\n{table}"
        else:
            try:
                with torch.no_grad():
                    meet([meeting.brought[rank] for rank in range(self.size)])
            except _Mismatch as error:
                meeting.mismatch = str(error)
        meeting.brought.clear()

    def _check_alive(self) -> None:
        if self._board.scheduler.is_given_up:
            raise Released
        if self._ended is None:
            self._ended = self._board.fault(self.rank)
            if self._ended is not None:  # meetings that can never be held keep nobody's tensors
                for meeting in self._board.meetings.values():
                    meeting.brought.pop(self.rank, None)
        if self._ended is not None:
            raise self._ended


class _ThreadWork(Work):
    """Waits for a meeting or a message by giving the turn to other ranks."""

    def __init__(
        self,
        transport: ThreadTransport,
        ready: Callable[[], bool],
        what: str,
        finish: Callable[[], None] | None,
        meeting: _SimulatedCall | None = None,
    ) -> None:
        self._transport = transport
        self._ready = ready
        self._what = what
        self._finish = finish
        self._meeting = meeting

    def wait(self, timeout: float | None = None) -> None:
        transport, board = self._transport, self._transport._board

        def can_go_on() -> bool:
            return self._ready() or transport._ended is not None or board.fault(transport.rank) is not None

        if not can_go_on():
            board.scheduler.wait(board.ranks[transport.rank], can_go_on, self._what)
        if not self._ready():
            transport._check_alive()
        if self._meeting is not None and self._meeting.mismatch:
            raise CollectiveMismatch(f"rank {transport.rank}: {self._meeting.mismatch}")
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_done(self) -> bool:
        """Gives the other ranks a turn first, so that polling in a loop comes to an end."""
        transport = self._transport
        board, turns = transport._board, iter((False,))
        board.scheduler.wait(board.ranks[transport.rank], lambda: next(turns, True), self._what)
        return self._ready() or board.fault(transport.rank) is not None


class _Mismatch(Exception):
    """Sizes that do not fit, found by the rank that does the work; every rank raises it as CollectiveMismatch."""


def _deliver(name: str, out: Tensor, part: Tensor, src: int, dst: int) -> None:
    if out.numel() != part.numel() or out.dtype != part.dtype:
        raise _size_error(name, out, part, src, dst)
    out.copy_(part.view(out.shape))


def _size_error(name: str, out: Tensor, part: Tensor, src: int, dst: int) -> _Mismatch:
    return _Mismatch(
        f"{name}: rank {src} sends {part.dtype} of shape {list(part.shape)}, "
        f"rank {dst} expects {out.dtype} of shape {list(out.shape)}"
    )


def _nothing(brought: list[Any]) -> None:
    return
