"""Reads how far the files of an offline run of Weights & Biases go: what a worker that was killed had not written.

Such a file is a log as LevelDB writes it (records in blocks of 32 KB) after a header of 7 bytes; its records are
messages of W&B's own. A record that is cut short ends the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

BLOCK = 32768
HEADER = 7
"""Bytes before the first record, and before each piece of one: checksum, length, kind."""
WHOLE, LAST = 1, 4


def last_step(files: Iterable[Path]) -> int:
    """Return the last step that is in these files; -1 when there is none."""
    records = import_module("wandb.proto.wandb_internal_pb2")
    found = -1
    for path in files:
        for data in read_records(path.read_bytes()):
            record = records.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                found = max(found, int(record.history.step.num))
    return found


def read_records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file.

    >>> piece = struct.pack("<IHB", 0, 2, WHOLE) + b"ab"
    >>> list(read_records(bytes(HEADER) + piece + piece[:8]))
    [b'ab']
    """
    at, record = HEADER, b""
    while at + HEADER <= len(data):
        left = -at % BLOCK or BLOCK
        if left < HEADER:
            at += left  # what is left of a block and cannot hold a header is padding
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + HEADER + length > len(data):
            return
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield record
            record = b""
