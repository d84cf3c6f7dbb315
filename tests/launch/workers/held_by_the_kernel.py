"""Rank 0 is in uninterruptible sleep: the parent of a vfork is, until its child execs or ends."""

import ctypes
import os
import time

if os.environ["RANK"] == "0":
    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        libc.sleep(600)
time.sleep(600)
