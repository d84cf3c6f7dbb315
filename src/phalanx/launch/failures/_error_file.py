"""Writes and reads error files: how a worker tells its agent what went wrong before it dies.

Owns the file's format (the JSON that torch's tools write and read: message, extraInfo with py_callstack and
timestamp) and the exit codes that stand for it where the disk takes no file. The first error of a process wins: a
later one is most often its consequence.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

EXIT_DO_NOT_RETRY = 93
"""How a process says that no other try would fare better: of a script, whatever it is written in, and of ``phalanx
run``."""

EXIT_INCURABLE, EXIT_ENDS_JOB = 183, 184
"""How a process says that it would fail again, or all others with it, when the disk takes no error file."""


def write_error_file(
    path: str,
    message: str,
    stack: str,
    *,
    is_incurable: bool,
    ends_job: bool = False,
    has_wrong_bits: bool = False,
) -> bool:
    """Write one error file; False when the disk does not take it.

    ``is_incurable`` marks what no restart can cure, ``ends_job`` what no survivor can, ``has_wrong_bits`` what no other
    worker of this node should try.
    """
    if not path or os.path.exists(path):
        return True
    data = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
        },
        "phalanx": {
            "time": time.time(),
            "is_incurable": is_incurable,
            "ends_job": ends_job,
            "has_wrong_bits": has_wrong_bits,
        },
    }
    return write_data(path, data)


def read_error_file(path: str) -> dict[str, Any] | None:
    """Return the content, or None when the worker left none (or was killed while writing it)."""
    try:
        with open(path) as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_data(path: str, data: dict[str, Any]) -> bool:
    """Write the content of an error file; False, and a line on stderr, when the disk does not take it."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w") as file:
            json.dump(data, file)
        os.replace(temporary, path)
        return True
    except OSError as problem:
        with suppress(OSError):
            os.write(2, f"phalanx: cannot write error file {path}: {problem}\n".encode())
        with suppress(OSError):
            os.unlink(temporary)
    return False
