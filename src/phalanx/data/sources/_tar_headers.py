"""Finds the members of a tar file: names, places and sizes, without reading their content.

Owns the tar format as far as samples need it: ustar with prefix, GNU long names, PAX headers of one member.
``fast_members`` reads those; whatever else a file has (global headers, links with long names, other types) sends it to
``slow_members``, which is Python's own reader: the reference that tests hold the fast one against. Sparse members are
refused, by name.
"""

from __future__ import annotations

import os
import re
import struct
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
_ZEROS = bytes(BLOCK)
_NUMBER = re.compile(r"\d+(\.\d*)?")
_PAX_RECORD = re.compile(rb"(\d+) ([^=]+)=")


class TarMember(NamedTuple):
    """A regular file in a tar file."""

    name: str
    offset: int
    size: int
    mtime: int = 0


class NotPlain(Exception):
    """The file has something that the fast reader leaves to the slow one."""


def members(file: BinaryIO, name: str) -> list[TarMember]:
    """Return the regular files of an open tar file; ``name`` is for messages.

    Raises ``ValueError`` for a file that is cut off or no tar file, and for sparse members.
    """
    try:
        return list(fast_members(file))
    except NotPlain:
        file.seek(0)
        return list(slow_members(file, name))


def slow_members(file: BinaryIO, name: str) -> Iterator[TarMember]:
    """Yield what Python's ``tarfile`` finds; the reference, and the way of unusual files."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for info in archive:
                if not info.isreg():
                    continue
                if info.issparse():
                    raise ValueError(f"{name}: member {info.name} is sparse; pack the file anew without sparse members")
                _check_end(file, name, info.name, info.offset_data + info.size)
                yield TarMember(info.name, info.offset_data, info.size, int(info.mtime))
            if os.pread(file.fileno(), BLOCK, archive.offset).strip(b"\0"):  # Python's reader would just stop here
                raise ValueError(f"{name} is cut off or damaged: no header can be read at byte {archive.offset}")
    except tarfile.TarError as error:
        raise ValueError(f"{name} cannot be read as a tar file: {error}") from error


def _check_end(file: BinaryIO, name: str, member: str, end: int) -> None:
    here = file.tell()
    length = file.seek(0, 2)
    file.seek(here)
    if end > length:
        raise ValueError(f"{name} is cut off: member {member} ends at byte {end}, the file at {length}")


def fast_members(file: BinaryIO) -> Iterator[TarMember]:
    """Yield the members of a file that has only plain ones; raise ``NotPlain`` at the first other thing."""
    handle = file.fileno()
    length = os.fstat(handle).st_size
    position, long_name = 0, ""
    override: dict[str, str] = {}
    while True:
        header = os.pread(handle, BLOCK, position)
        if len(header) < BLOCK or header == _ZEROS:
            if (header and len(header) < BLOCK) or long_name or override or not position:
                raise NotPlain  # cut off, or empty: the slow reader says how
            return
        if not _is_header(header):
            raise NotPlain
        kind, size = header[156:157], _octal(header[124:136])
        begin = position + BLOCK
        if kind == b"L":
            long_name = _text(os.pread(handle, size, begin))
        elif kind == b"x":
            override = _pax_records(os.pread(handle, size, begin))
        elif kind in b"0\0" and not (kind == b"\0" and _text(header[:100]).endswith("/")):
            size = int(override.get("size", size))
            if begin + size > length:
                raise NotPlain
            mtime = int(float(override.get("mtime", _octal(header[136:148]))))
            yield TarMember(override.get("path") or long_name or _name(header), begin, size, mtime)
            long_name, override = "", {}
        elif kind == b"5" and not size and "size" not in override:
            long_name, override = "", {}  # a folder
        else:
            raise NotPlain
        position = begin + -(-size // BLOCK) * BLOCK


def _name(header: bytes) -> str:
    prefix = _text(header[345:500])
    return f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100])


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _octal(field: bytes) -> int:
    if field[0] in (0o200, 0o377):
        raise NotPlain  # a number of more than 8 GB, in base 256
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise NotPlain from None


def _is_header(header: bytes) -> bool:
    """Return whether the sum of a header's bytes, with spaces for the sum itself, is as it says: unsigned or signed."""
    said = _octal(header[148:156])
    return said == 256 + sum(header[:148]) + sum(header[156:]) or said == 256 + sum(struct.unpack("148b8x356b", header))


def _pax_records(body: bytes) -> dict[str, str]:
    records, position = {}, 0
    while match := _PAX_RECORD.match(body, position):
        stop = match.start() + int(match[1])
        try:
            key, value = match[2].decode(), body[match.end() : stop - 1].decode()
        except UnicodeDecodeError:
            raise NotPlain from None
        if key == "hdrcharset" or key.startswith("GNU.sparse") or stop <= match.end():
            raise NotPlain
        if (key == "size" and not value.isdecimal()) or (key == "mtime" and not _NUMBER.fullmatch(value)):
            raise NotPlain
        records[key] = value.rstrip("/") if key == "path" else value
        position = stop
    return records
