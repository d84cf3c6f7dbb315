"""Sends and receives: one ring of bytes for every ordered pair of ranks, messages with tags.

A message is a header of four words (tag, bytes, two spare) and its bytes, padded to 32. The sender writes as far as the
ring has room, the receiver frees as it reads, so messages of any size pass. A message whose tag nobody asked for yet is
taken out and kept aside, so it never blocks one behind it. A send is over when its last byte is in the ring.
"""

from __future__ import annotations

import ctypes
from collections import deque

from torch import Tensor

from phalanx.comm.transports.shm._collectives import nbytes_of
from phalanx.comm.transports.shm._engine import Engine, Lane, Steps
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
        self._rank, self._peer = rank, peer
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
        kept = self._aside.get(tag)
        if kept:
            message = kept.popleft()
            self._check(tag, len(message) - 1, tensor)
            copy_bytes(tensor.data_ptr(), ctypes.addressof(message), len(message) - 1)
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
                f"rank {self._rank}: rank {self._peer} sent {sent} bytes with tag {tag}, but recv got a tensor of "
                f"{nbytes_of(tensor)} bytes; both must be of the same size"
            )
