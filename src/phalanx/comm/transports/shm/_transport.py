"""ShmTransport: the collectives of ``Group`` through memory that the ranks of one host share.

Owns the life of one group's segment and the mapping from the ``Transport`` interface to the generators that move bytes.
What happens when a rank dies, by where it is: while the group forms, see ``_segment_join``; while others wait for it,
they raise ``PeerLost`` within some milliseconds; after it put its part, the others finish that collective and lose it
in the next; in the middle of writing a slot, its READY flag was never raised, so nobody reads the half-written slot. In
every case the survivors' transport is dead, its memory is freed with the last mapping, and they form the next
generation's group.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from phalanx._devices import is_host
from phalanx.comm.failure._liveness import Identity
from phalanx.comm.stores._interface import Store
from phalanx.comm.transports._interface import Arrived, Done, ReduceOp, Transport, Work
from phalanx.comm.transports.shm import _collectives as by_slots
from phalanx.comm.transports.shm import _direct as direct
from phalanx.comm.transports.shm import _segment_layout as L
from phalanx.comm.transports.shm._collectives import nbytes_of
from phalanx.comm.transports.shm._engine import Engine, Lane, Steps
from phalanx.comm.transports.shm._fold import Fold
from phalanx.comm.transports.shm._peers import Peers
from phalanx.comm.transports.shm._regions import Regions
from phalanx.comm.transports.shm._rings import Channel, recv_any
from phalanx.comm.transports.shm._segment import Segment
from phalanx.comm.transports.shm._segment_join import (
    Interrupt,
    ShmUnavailable,
    exchange_identities,
    join,
    obstacle,
)
from phalanx.comm.transports.shm._segment_layout import SegmentLayout
from phalanx.comm.transports.shm._shared_tensors import shared_empty
from phalanx.comm.transports.shm._window import Window
from phalanx.errors import GroupAborted

_DONE = Done()


def _mark_closed(segment: Segment, pid: int) -> None:
    """For a process that ends in good order without closing: not for a forked child of it."""
    state = segment.layout.block(segment.rank) + L.STATE
    if os.getpid() == pid and segment.words[state] == L.OPEN:
        segment.words[state] = L.CLOSED


class ShmTransport(Transport):
    """Ranks of one host. Make it with ``create``; all ranks together."""

    name = "shm"
    compares_calls = True

    def __init__(self, segment: Segment, peers: Peers, *, timeout: float, threaded: bool) -> None:
        self.rank, self.size = segment.rank, segment.layout.size
        self._peers = peers
        self._engine = Engine(segment, peers, timeout, threaded=threaded)
        self._window = Window(self._engine)
        self._regions = Regions(segment, peers.pids)
        self._direct_bytes = min(direct.DIRECT_BYTES, segment.layout.slot_bytes)
        self._channels: dict[int, Channel] = {}
        self._any_source: Lane | None = None
        self._folds: dict[tuple[ReduceOp, torch.dtype], Fold] = {}
        self._at_exit = weakref.finalize(self, _mark_closed, segment, os.getpid())

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float = 300.0,
        generation: int = 0,
        identities: Mapping[int, Identity] | None = None,
        interrupt: Interrupt | None = None,
        progress: str = "thread",
        layout: SegmentLayout | None = None,
    ) -> ShmTransport:
        """Form the transport among ``size`` ranks that all call this with the same ``store`` namespace.

        ``identities`` are the ranks' processes where the caller has exchanged them already.

        ``progress`` says who moves asynchronous collectives on: ``"thread"``, one background thread, or ``"caller"``,
        whoever calls ``wait`` or ``is_done`` of any of them (no thread, for callers that come by often).
        Raises ``ShmUnavailable`` on every rank when they cannot share memory, ``PeerLost`` or ``PeerTimeout`` when one
        of them died or did not come.
        """
        if progress not in ("thread", "caller"):
            raise ValueError(f"progress must be 'thread' or 'caller', not {progress!r}")
        store = store.namespace("shm")
        if identities is None:
            identities = exchange_identities(store, rank, size, timeout)
        reason = obstacle(identities)
        if reason is not None:
            raise ShmUnavailable(reason)
        peers = Peers(identities, rank, generation)
        try:
            segment = join(store, rank, layout or SegmentLayout(size=size), peers, timeout=timeout, interrupt=interrupt)
        except BaseException:
            peers.close()
            raise
        return cls(segment, peers, timeout=timeout, threaded=progress == "thread")

    def _start(self, steps: Steps, async_op: bool, lane: Lane | None = None) -> Work:
        engine = self._engine
        if async_op:
            return engine.submit(lane or engine.collective, steps)
        engine.run(lane or engine.collective, steps)
        return _DONE

    def _fold(self, op: ReduceOp, dtype: torch.dtype) -> Fold:
        fold = self._folds.get((op, dtype))
        if fold is None:
            fold = self._folds[op, dtype] = Fold(op, dtype, self.size)
        return fold

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        if not is_host(tensor):
            self._refuse(tensor)
        fold = self._fold(op, tensor.dtype)
        if self._is_large(tensor):
            return self._start(direct.all_reduce(self._window, self._regions, tensor, fold, op), async_op)
        return self._start(by_slots.all_reduce(self._window, tensor, fold, op), async_op)

    def reduce(self, tensor: Tensor, op: ReduceOp, dst: int, *, async_op: bool) -> Work:
        self._check_device(tensor)
        fold = self._fold(op, tensor.dtype)
        return self._start(by_slots.reduce(self._window, tensor, fold, op, dst), async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool) -> Work:
        self._check_device(tensor)
        if self._is_large(tensor):
            return self._start(direct.broadcast(self._window, self._regions, tensor, src), async_op)
        return self._start(by_slots.broadcast(self._window, tensor, src), async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, async_op: bool) -> Work:
        self._check_device(tensor, *outputs)
        if any(map(self._is_large, outputs)):
            return self._start(direct.all_gather(self._window, self._regions, outputs, tensor), async_op)
        return self._start(by_slots.all_gather(self._window, outputs, tensor), async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *, async_op: bool) -> Work:
        return self.all_gather(self._parts(output), tensor, async_op=async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, *, async_op: bool) -> Work:
        self._check_device(output, *inputs)
        fold = self._fold(op, output.dtype)
        if any(map(self._is_large, inputs)):
            steps = direct.reduce_scatter(self._window, self._regions, output, inputs, fold, op)
            return self._start(steps, async_op)
        return self._start(by_slots.reduce_scatter(self._window, output, inputs, fold, op), async_op)

    def reduce_scatter_tensor(self, output: Tensor, tensor: Tensor, op: ReduceOp, *, async_op: bool) -> Work:
        return self.reduce_scatter(output, self._parts(tensor), op, async_op=async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, async_op: bool) -> Work:
        self._check_device(*outputs, *inputs)
        return self._start(direct.all_to_all(self._window, self._regions, outputs, inputs), async_op)

    def _check_device(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not is_host(tensor):
                self._refuse(tensor)

    def _refuse(self, tensor: Tensor) -> NoReturn:
        """Tensors are touched by address: one of another device would be no error but a crash."""
        raise TypeError(
            f"rank {self.rank}: the same-host transport got a tensor on {tensor.device}; expected one in the host's "
            "memory (.cpu()), or make the group with a backend that carries that device"
        )

    def _is_large(self, tensor: Tensor) -> bool:
        """Return whether it is worth asking if all ranks' tensors are in shared memory; must come out alike on all."""
        return nbytes_of(tensor) > self._direct_bytes

    def _parts(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.view(self.size, -1).unbind(0) if whole.numel() else [whole] * self.size

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int, *, async_op: bool) -> Work:
        outputs = outputs if self.rank == dst else None
        self._check_device(tensor, *(outputs or ()))
        return self._start(by_slots.gather(self._window, outputs, tensor, dst), async_op)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int, *, async_op: bool) -> Work:
        inputs = inputs if self.rank == src else None
        self._check_device(output, *(inputs or ()))
        return self._start(by_slots.scatter(self._window, output, inputs, src), async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, *, async_op: bool) -> Work:
        self._check_device(tensor)
        channel = self._channel(dst)
        return self._start(channel.send(tensor, tag), async_op, channel.sending)

    def recv(self, tensor: Tensor, src: int, tag: int, *, async_op: bool) -> Work:
        self._check_device(tensor)
        channel = self._channel(src)
        return self._start(channel.recv(tensor, tag), async_op, channel.receiving(tag))

    def recv_any(self, tensor: Tensor, tag: int, arrived: Arrived, *, async_op: bool) -> Work:
        self._check_device(tensor)
        channels = [self._channel(peer) for peer in self._window.peers]
        if self._any_source is None:  # behind the channels' own lanes: these come first
            self._any_source = self._engine.lane()
        work = self._engine.submit(self._any_source, recv_any(channels, tensor, tag, arrived))
        if not async_op:
            work.wait()
        return work

    def _channel(self, peer: int) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            channel = self._channels[peer] = Channel(self._engine, peer)
        return channel

    def barrier(self, *, async_op: bool) -> Work:
        return self._start(by_slots.barrier(self._window), async_op)

    def shared_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return shared_empty(shape, dtype)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._peers.dead_now()

    def abort(self, cause: BaseException) -> None:
        self._engine.fail(cause)

    def close(self) -> None:
        if self._engine.end_with(GroupAborted(f"rank {self.rank} has closed this group")):
            self._engine.leave(L.CLOSED)
        self._engine.join_thread()
        self._at_exit.detach()
        self._window.forget_views()
        self._folds.clear()
        self._channels.clear()
        self._regions.close()
        self._peers.close()
