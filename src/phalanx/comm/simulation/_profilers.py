"""Keeps a simulated rank from profiling while another profiler runs in the process.

Owns the check around torch's profiler. torch has one profiling session for a process: two at a time, in plain threads
too, end it with a segmentation fault (torch 2.13.0). Ranks that are processes profile as they like; of ranks that are
threads of one process, one may, or the caller of ``run``. Profilers of other threads are noted and never refused.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from torch.autograd import profiler

from phalanx._torch_private import is_profiler_enabled
from phalanx.comm.group import _context

_lock = threading.Lock()
_running: dict[
    int, tuple[weakref.ref[Any], str]
] = {}  # the profilers that have begun and not ended, and who began them


def install() -> None:
    """Put the check around torch's profiler, once."""
    session: Any = profiler.profile
    plain_begin, plain_end = session._prepare_trace, session.__exit__
    if hasattr(plain_begin, "_phalanx"):
        return

    @functools.wraps(plain_begin)
    def begin(self: Any) -> None:
        _note(self)
        plain_begin(self)

    @functools.wraps(plain_end)
    def end(self: Any, *error: Any) -> Any:
        try:
            return plain_end(self, *error)
        finally:
            with _lock:
                _running.pop(id(self), None)

    begin._phalanx = True  # type: ignore[attr-defined]  # says that it was put there
    session._prepare_trace, session.__exit__ = begin, end


def _note(session: Any) -> None:
    rank = _context.rank_token()
    who = threading.current_thread().name
    with _lock:
        others = [name for key, (alive, name) in _running.items() if key != id(session) and alive() is not None]
        if rank is not None and (others or is_profiler_enabled(profiler)):
            raise RuntimeError(
                f"{who} of a simulation cannot start a profiler while one runs in "
                f"{' and '.join(others) or 'the process'}: simulated ranks are threads of one process, and torch has "
                f"one profiler for each process. Profile on one rank only (if group.rank == 0), or run the ranks as "
                f"processes"
            )
        _running[id(session)] = (weakref.ref(session), who)
