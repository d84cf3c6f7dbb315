"""Runs collectives over several hosts in two levels: shared memory inside a host, c10d between one leader of each.

Owns the composition only. all_reduce, all_gather, reduce_scatter and broadcast go over both levels where that is
faster (``PAYS_UP_TO``); everything else goes over ``flat``, a c10d transport among all ranks. A failure of any level
ends all three, so that the other hosts see this rank's connections close.

Plans (L: within the host, H: among the hosts' leaders, which are the local ranks 0):

- all_reduce: L reduce to the leader; H all_reduce; L broadcast.
- broadcast: L broadcast in the source's host; H broadcast; L broadcast in the other hosts.
- all_gather: L gather to the leader; H all_gather of whole hosts; L broadcast; pick the parts.
- reduce_scatter: L reduce, parts grouped by host; H reduce_scatter by host; L scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.transports._interface import Arrived, Done, ReduceOp, Transport, Work
from phalanx.comm.transports._ordered import OrderedCalls, QueuedCall
from phalanx.errors import CommError

_DONE = Done()

KB = 1024
ANY = 1 << 62
PAYS_UP_TO = {
    "all_reduce": (ANY, 256 * KB),
    "broadcast": (ANY, ANY),
    "all_gather": (1024 * KB, 256 * KB),
    "reduce_scatter": (ANY, 256 * KB),
}
"""Up to how many bytes (of the larger side) two levels are the faster way: where every host has several ranks, and
where some host has one only. Measured by ``benchmarks/_two_level.py``, see docs/adr/0004-two-levels-by-table.md. A
table, not a trial when the group forms: the way decides the order of additions, so that a trial could give other bits
in every run, and it would slow every regroup."""


@dataclass(frozen=True)
class Hosts:
    """Which ranks live together: one tuple of ranks per host, in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def group(cls, host_of_rank: Sequence[str]) -> Hosts:
        """
        >>> Hosts.group(["a", "b", "a"]).ranks
        ((0, 2), (1,))
        """
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(host_of_rank):
            members.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, members.values())))

    def host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def lonely(self) -> bool:
        """Whether some host has one rank only."""
        return any(len(ranks) == 1 for ranks in self.ranks)

    @property
    def pays(self) -> bool:
        """Whether two levels save anything: several hosts, and one at least with several ranks."""
        return len(self.ranks) > 1 and any(len(ranks) > 1 for ranks in self.ranks)


class TwoLevelTransport(Transport):
    """``local``: this host's ranks; ``leaders``: on local rank 0 only; ``flat``: all ranks."""

    name = "two_level"

    def __init__(self, rank: int, hosts: Hosts, local: Transport, leaders: Transport | None, flat: Transport) -> None:
        self.rank, self.size = rank, flat.size
        self._hosts = hosts
        self._host = hosts.host_of(rank)
        self._local, self._leaders, self._flat = local, leaders, flat
        self.pays_up_to = {kind: limits[hosts.lonely] for kind, limits in PAYS_UP_TO.items()}
        self._calls = OrderedCalls("phalanx-two-level")

    def _pays(self, kind: str, *tensors: Tensor) -> bool:
        """Return whether two levels are faster; must come out alike on every rank, so ``tensors`` are of sizes all
        know."""
        return sum(t.numel() * t.element_size() for t in tensors) <= self.pays_up_to[kind]

    def _start(self, call: Callable[[], object], async_op: bool) -> Work:
        def guarded() -> None:
            try:
                call()
            except CommError as error:
                self.abort(error)
                raise

        if async_op:
            return self._calls.submit(QueuedCall(guarded))
        self._calls.run(guarded)
        return _DONE

    # -- over both levels ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        if not self._pays("all_reduce", tensor):
            return self._start(lambda: self._flat.all_reduce(tensor, op, async_op=False), async_op)

        def call() -> None:
            inner = ReduceOp.SUM if op is ReduceOp.AVG else op
            self._local.reduce(tensor, inner, 0, async_op=False)
            if self._leaders is not None:
                self._leaders.all_reduce(tensor, inner, async_op=False)
                if op is ReduceOp.AVG:
                    tensor.data.div_(self.size)
            self._local.broadcast(tensor, 0, async_op=False)

        return self._start(call, async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        if not self._pays("broadcast", tensor):
            return self._start(lambda: self._flat.broadcast(tensor, src, async_op=False), async_op)

        def call() -> None:
            host = self._hosts.host_of(src)
            if host == self._host:
                self._local.broadcast(tensor, self._hosts.ranks[host].index(src), async_op=False)
            if self._leaders is not None:
                self._leaders.broadcast(tensor, host, async_op=False)
            if host != self._host:
                self._local.broadcast(tensor, 0, async_op=False)

        return self._start(call, async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        if not self._pays("all_gather", *outputs):
            return self._start(lambda: self._flat.all_gather(outputs, tensor, async_op=False), async_op)

        def call() -> None:
            sizes = [[_bytes(outputs[rank]).numel() for rank in ranks] for ranks in self._hosts.ranks]
            everything = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
            hosts = torch.split(everything, [sum(of_host) for of_host in sizes])
            if self._leaders is not None:
                mine = list(torch.split(hosts[self._host], sizes[self._host]))
                self._local.gather(mine, _bytes(tensor), 0, async_op=False)
                self._leaders.all_gather(hosts, hosts[self._host].clone(), async_op=False)
            else:
                self._local.gather(None, _bytes(tensor), 0, async_op=False)
            self._local.broadcast(everything, 0, async_op=False)
            for ranks, of_host, part in zip(self._hosts.ranks, sizes, hosts, strict=True):
                for rank, piece in zip(ranks, torch.split(part, of_host), strict=True):
                    _bytes(outputs[rank]).copy_(piece)

        return self._start(call, async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        return self.all_gather(self._parts(output), tensor, async_op=async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        if not self._pays("reduce_scatter", *inputs):
            return self._start(lambda: self._flat.reduce_scatter(output, inputs, op, async_op=False), async_op)

        def call() -> None:
            inner = ReduceOp.SUM if op is ReduceOp.AVG else op
            sizes = [[inputs[rank].numel() for rank in ranks] for ranks in self._hosts.ranks]
            ordered = torch.cat([inputs[rank].data.reshape(-1) for ranks in self._hosts.ranks for rank in ranks])
            self._local.reduce(ordered, inner, 0, async_op=False)
            parts: list[Tensor] | None = None
            if self._leaders is not None:
                own = torch.empty(sum(sizes[self._host]), dtype=output.dtype)
                by_host = torch.split(ordered, [sum(of_host) for of_host in sizes])
                self._leaders.reduce_scatter(own, by_host, inner, async_op=False)
                if op is ReduceOp.AVG:
                    own.div_(self.size)
                parts = list(torch.split(own, sizes[self._host]))
            self._local.scatter(output.data.view(-1), parts, 0, async_op=False)

        return self._start(call, async_op)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self.reduce_scatter(output, self._parts(tensor), op, async_op=async_op)

    def _parts(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.view(self.size, -1).unbind(0) if whole.numel() else [whole] * self.size

    # -- over one -----------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        return self._start(lambda: self._flat.reduce(tensor, op, dst, async_op=False), async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        return self._start(lambda: self._flat.all_to_all(outputs, inputs, async_op=False), async_op)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        return self._start(lambda: self._flat.gather(outputs, tensor, dst, async_op=False), async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        return self._start(lambda: self._flat.scatter(output, inputs, src, async_op=False), async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        return self._flat.send(tensor, dst, tag, async_op=async_op)

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        return self._flat.recv(tensor, src, tag, async_op=async_op)

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        return self._flat.recv_any(tensor, tag, arrived, async_op=async_op)

    def barrier(self, *, async_op: bool) -> Work:
        return self._start(lambda: self._flat.barrier(async_op=False), async_op)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._local.shared_empty(shape, dtype)

    def _levels(self) -> list[Transport]:
        return [level for level in (self._local, self._leaders, self._flat) if level is not None]

    def abort(self, cause: BaseException) -> None:
        for level in self._levels():
            level.abort(cause)

    def close(self) -> None:
        self._calls.stop()
        for level in self._levels():
            level.close()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.data.reshape(-1).view(torch.uint8)
