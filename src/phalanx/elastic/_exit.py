"""How a worker's process ends: whether its script has ended well, and how to end badly from an exit function."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from phalanx import protocol


def has_ended_well(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the script, which has ended, did so with code 0. Asked in an exit function.

    Our launcher says so; where the interpreter was started by somebody else (``--no-python``), an exception that nobody
    caught is known, but not the code of a ``sys.exit``.
    """
    code = environ.get(protocol.ENV_EXIT_CODE)
    if code is not None:
        return code == "0"
    return getattr(sys, "last_value", None) is None


def fail_at_exit(error: BaseException) -> NoReturn:
    """End this process with an error: an exception that leaves an exit function would change nothing."""
    with suppress(Exception):
        print(f"phalanx: {type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
