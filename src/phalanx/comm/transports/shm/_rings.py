"""Sends and receives: one ring of bytes for every ordered pair of ranks, messages with tags.

A message is a header of four words (tag, bytes, two spare) and its bytes, padded to 32. The sender writes as far as the
ring has room, the receiver frees as it reads, so messages of any size pass. A message whose tag nobody asked for yet is
taken out and kept aside, so it never blocks one behind it. A send is over when its last byte is in the ring.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Generator, Sequence

from torch import Tensor

from phalanx.comm.transports._interface import Arrived
from phalanx.comm.transports.shm._collectives import nbytes_of
from phalanx.comm.transports.shm._engine import AnySteps, Engine, Lane, Steps
from phalanx.comm.transports.shm._segment_layout import token
from phalanx.comm.transports.shm._syscalls import copy_bytes, fence
from phalanx.errors import CollectiveMismatch

_HEADER = 32


class _Header(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("nbytes", ctypes.c_int64), ("spare", ctypes.c_int64 * 2))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _HEADER) * _HEADER


class Channel:
    """This rank's end of the two rings between it and ``peer``."""

    def __init__(self, engine: Engine, peer: int) -> None:
        segment = engine.segment
        layout, rank = segment.layout, segment.rank
        self._engine = engine
        self._words = segment.words
        self._rank, self.peer = rank, peer
        self._capacity = layout.ring_bytes
        self._out = layout.channel(rank, peer)
        self._in = layout.channel(peer, rank)
        self._base = segment.address
        self._aside: dict[int, deque[ctypes.Array[ctypes.c_char]]] = {}
        self.sending: Lane = engine.lane()
        self.receiving: Lane = engine.lane()

    def send(self, tensor: Tensor, tag: int) -> Steps:
        nbytes = nbytes_of(tensor)
        header = _Header(tag, nbytes)
        yield from self._write(ctypes.addressof(header), _HEADER)
        yield from self._write(tensor.data_ptr(), nbytes)
        rest = _padded(nbytes) - nbytes
        if rest:
            yield from self._write(None, rest)

    def _write(self, address: int | None, nbytes: int) -> Steps:
        head_word, tail_word, ring = self._out
        words, capacity = self._words, self._capacity
        done = 0
        while done < nbytes:
            head = words[head_word]
            room = capacity - (head - words[tail_word])
            # A few large pieces rather than many small ones: wait until half the ring is free.
            wanted = min(nbytes - done, capacity // 2)
            if room < wanted:
                yield token(tail_word, head + wanted - capacity)
                continue
            if fence is not None:
                fence()
            at = head % capacity
            piece = min(nbytes - done, room, capacity - at)
            if address is not None:
                copy_bytes(self._base + ring + at, address + done, piece)
            done += piece
            self._engine.raise_flag(head_word, head + piece)

    def recv(self, tensor: Tensor, tag: int) -> Steps:
        if self.take_kept(tensor, tag):
            return
        while True:
            header = _Header()
            yield from self._read(ctypes.addressof(header), _HEADER)
            nbytes = header.nbytes
            if header.tag == tag:
                self._check(tag, nbytes, tensor)
                yield from self._read(tensor.data_ptr(), nbytes)
                yield from self._read(None, _padded(nbytes) - nbytes)
                return
            yield from self._set_aside(header)

    def take_kept(self, tensor: Tensor, tag: int) -> bool:
        """Return whether there was a message with this tag aside; it is in ``tensor`` then."""
        try:
            message = self._aside[tag].popleft()
        except (KeyError, IndexError):  # another thread may have come first
            return False
        self._check(tag, len(message) - 1, tensor)
        copy_bytes(tensor.data_ptr(), ctypes.addressof(message), len(message) - 1)
        return True

    def _set_aside(self, header: _Header) -> Steps:
        """Take out the message behind a header that was read, for whoever asks for its tag later."""
        nbytes = header.nbytes
        message = ctypes.create_string_buffer(nbytes + 1)  # one more, since no array has no length
        yield from self._read(ctypes.addressof(message), nbytes)
        yield from self._read(None, _padded(nbytes) - nbytes)
        self._aside.setdefault(header.tag, deque()).append(message)

    def arrival(self) -> int:
        """Return the token of "there is something to read"."""
        head_word, tail_word, _ = self._in
        return token(head_word, self._words[tail_word] + 1)

    def find(self, tag: int) -> Generator[int, None, bool]:
        """Return whether a message with this tag has begun to arrive, taking out those before it."""
        head_word, tail_word, ring = self._in
        while not self._aside.get(tag):
            tail = self._words[tail_word]
            if self._words[head_word] == tail:
                return False
            if fence is not None:
                fence()
            # A header lies in one piece and comes at once: the ring's length is a multiple of it.
            header = _Header.from_address(self._base + ring + tail % self._capacity)
            if header.tag == tag:
                return True
            header = _Header()
            yield from self._read(ctypes.addressof(header), _HEADER)
            yield from self._set_aside(header)
        return True

    def _read(self, address: int | None, nbytes: int) -> Steps:
        head_word, tail_word, ring = self._in
        words, capacity = self._words, self._capacity
        done = 0
        while done < nbytes:
            tail = words[tail_word]
            there = words[head_word] - tail
            if not there:
                yield token(head_word, tail + 1)
                continue
            if fence is not None:
                fence()
            at = tail % capacity
            piece = min(nbytes - done, there, capacity - at)
            if address is not None:
                copy_bytes(address + done, self._base + ring + at, piece)
            done += piece
            self._engine.raise_flag(tail_word, tail + piece)

    def _check(self, tag: int, sent: int, tensor: Tensor) -> None:
        if sent != nbytes_of(tensor):
            raise CollectiveMismatch(
                f"rank {self._rank}: rank {self.peer} sent {sent} bytes with tag {tag}, but recv got a tensor of "
                f"{nbytes_of(tensor)} bytes; both must be of the same size"
            )


def recv_any(channels: Sequence[Channel], tensor: Tensor, tag: int, arrived: Arrived) -> AnySteps:
    """Receive from whichever peer sends first with this tag.

    A ring from which a ``recv`` reads is left to that one; what it sets aside is taken.
    """
    while True:
        for channel in channels:
            if channel.take_kept(tensor, tag):
                arrived(channel.peer)
                return
            lane = channel.receiving
            if lane.tasks or not lane.lock.acquire(blocking=False):
                continue
            try:
                if (yield from channel.find(tag)):
                    yield from channel.recv(tensor, tag)
                    arrived(channel.peer)
                    return
            finally:
                lane.lock.release()
        yield tuple(-channel.arrival() for channel in channels)
