"""Writes down which functions of the library begin, in every process that starts with this folder on PYTHONPATH.

One line each: seconds, pid, file, function; the first time in a process only. With ``RECORD_AFTER`` nothing is written
before that file exists, and from then on every time: a function may begin once more before what is looked for.
"""

import os
import sys
import threading
import time

_target = os.environ.get("RECORD_TO", "")
_mark = os.environ.get("RECORD_AFTER", "")
_seen = set()
_state = {"pid": os.getpid(), "on": not _mark}


def _note(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    _, found, file = code.co_filename.partition("/src/phalanx/")
    if not found:
        return
    if not _state["on"]:
        if not os.path.exists(_mark):
            return
        _state["on"] = True
    if os.getpid() != _state["pid"]:  # forked
        _state["pid"] = os.getpid()
        _seen.clear()
    if _mark or (file, code.co_name) not in _seen:
        _seen.add((file, code.co_name))
        with open(_target, "a") as log:
            log.write(f"{time.time():.6f} {os.getpid()} {file} {code.co_name}\n")


if _target:
    threading.setprofile(_note)
    sys.setprofile(_note)
