"""Sends and receives: one ring of bytes for every ordered pair of ranks, messages with tags.

A message is a header of four words (tag, bytes, two spare) and its bytes, padded to 32. The sender writes as far as the
ring has room, the receiver frees as it reads, so messages of any size pass. A message whose tag nobody asked for yet is
taken out and kept aside, so it never blocks one behind it. A send is over when its last byte is in the ring.

Receives of one tag from one peer come one after the other, in a lane of their own; those of other tags do not wait for
them. Whoever finds a message at the front of the ring owns the ring until he has taken that message out, for himself or
aside; the others wait for the number of messages taken to grow. Looking, taking over and giving back are atomic, so
that nobody waits for a message that was taken out before he looked.
"""

from __future__ import annotations

import ctypes
import threading
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
        self._mutex = threading.Lock()
        self._is_owned = False
        self._taken = 0
        self._taken_word = layout.taken_word(peer, rank)
        self.sending: Lane = engine.lane()
        self._receiving: dict[int, Lane] = {}

    def receiving(self, tag: int) -> Lane:
        """Return the lane of receives with this tag; lanes without work are used again for other tags."""
        lane = self._receiving.get(tag)
        if lane is None or not lane.tasks:
            idle = next((other for other, found in self._receiving.items() if not found.tasks), None)
            lane = self._engine.lane() if idle is None else self._receiving.pop(idle)
            self._receiving[tag] = lane
        return lane

    def awaits(self, tag: int) -> bool:
        """Return whether receives with this tag are under way."""
        lane = self._receiving.get(tag)
        return lane is not None and bool(lane.tasks)

    def own(self) -> int | None:
        """Own the ring, if a message is there and nobody else does; else return the token to wait for."""
        head_word, tail_word, _ = self._in
        with self._mutex:
            if self._is_owned:
                return token(self._taken_word, self._taken + 1)
            tail = self._words[tail_word]
            if self._words[head_word] == tail:
                return token(head_word, tail + 1)
            self._is_owned = True
            return None

    def next_taken(self) -> int:
        """Return the token of "another message was taken out"."""
        with self._mutex:
            return token(self._taken_word, self._taken + 1)

    def _give_back(self) -> None:
        """Own the ring no longer: a message was taken out."""
        with self._mutex:
            self._is_owned = False
            self._taken += 1
            self._engine.raise_flag(self._taken_word, self._taken)
        self._engine.wake_if_asleep()

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
        while not self.take_kept(tensor, tag):
            wait = self.own()
            if wait is not None:
                yield wait
            elif (yield from self.take_out(tensor, tag)):
                return

    def take_out(self, tensor: Tensor, tag: int) -> Generator[int, None, bool]:
        """Take out the message at the front of the ring, which is owned: into ``tensor`` if it has this tag, or aside.

        Return whether it had.
        """
        try:
            if self._aside.get(tag):  # an earlier one, put there between looking for it and owning the ring
                return self.take_kept(tensor, tag)
            header = _Header()
            yield from self._read(ctypes.addressof(header), _HEADER)
            nbytes = header.nbytes
            if header.tag != tag:
                yield from self._set_aside(header)
                return False
            self._check(tag, nbytes, tensor)
            yield from self._read(tensor.data_ptr(), nbytes)
            yield from self._read(None, _padded(nbytes) - nbytes)
            return True
        finally:
            self._give_back()

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

    A ring from which a ``recv`` wants this tag is left to that one.
    """
    while True:
        waits = []
        for channel in channels:
            wait = None
            while wait is None:
                if channel.take_kept(tensor, tag):
                    arrived(channel.peer)
                    return
                wait = channel.own() if not channel.awaits(tag) else channel.next_taken()
                if wait is None and (yield from channel.take_out(tensor, tag)):
                    arrived(channel.peer)
                    return
            waits.append(-wait)
        yield tuple(waits)
