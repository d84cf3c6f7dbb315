"""Sends JSON messages, with file descriptors beside them, over a Unix stream socket.

Owns the framing between agent, zygote and parked workers: four bytes of length, then the JSON text; descriptors ride
on the first byte. Nothing is pickled. A closed peer reads as ``None``, never as a half message.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from phalanx._fields import load_json, short
from phalanx.errors import PhalanxError

_HEADER = struct.Struct("!I")
_MAX_FDS = 16
_MAX_SIZE = 256 << 20
"""Bytes of a message: far more than an order with a large environment has."""


class MessageError(PhalanxError, OSError):
    """What came is not a message: the peer is not one of ours, or its memory is damaged."""


def send_message(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message whole. ``OSError`` (mostly ``BrokenPipeError``) when the peer is gone."""
    assert len(fds) <= _MAX_FDS, f"{len(fds)} descriptors in one message; the receiver takes {_MAX_FDS}"
    body = json.dumps(message, separators=(",", ":")).encode()
    data = _HEADER.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Block for one message and its descriptors (close-on-exec); None when the peer has closed."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, _HEADER.size, _MAX_FDS)
        header = _receive_rest(sock, data, _HEADER.size)
        if header is None:
            return None
        size = _HEADER.unpack(header)[0]
        if size > _MAX_SIZE:
            raise MessageError(f"a message of {size} bytes; expected at most {_MAX_SIZE}")
        body = _receive_rest(sock, b"", size)
        if body is None:
            return None
        return parse_message(body), fds
    except ConnectionResetError:
        return None


def parse_message(body: bytes) -> dict[str, Any]:
    """Parse a message; ``MessageError`` when it is none."""
    message = load_json(body, "a message", MessageError)
    if not isinstance(message, dict):
        raise MessageError(f"a message is {short(message)}; expected an object with named fields")
    return message


def _receive_rest(sock: socket.socket, data: bytes, size: int) -> bytes | None:
    parts = [data]
    missing = size - len(data)
    while missing:
        part = sock.recv(missing)
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
