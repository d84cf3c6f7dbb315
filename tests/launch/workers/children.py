"""A worker with a child that would outlive it. Appends "pid parent" of both to DIRECTORY/pids, then waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time

child = subprocess.Popen(["sleep", "600"])
with open(os.path.join(sys.argv[1], "pids"), "a") as file:
    file.write(f"{os.getpid()} {os.getppid()}\n{child.pid} {os.getpid()}\n")
time.sleep(600)
