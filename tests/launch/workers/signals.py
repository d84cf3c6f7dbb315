"""A worker that notes the signals it gets in DIRECTORY/got; "polite" then ends, "deaf" goes on for ever."""

from __future__ import annotations

import os
import signal
import sys
import time


def note(name: str, *words: object) -> None:
    with open(os.path.join(sys.argv[1], name), "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def on_signal(signum: int, frame: object) -> None:
    note("got", os.environ["RANK"], signum)
    if sys.argv[2] == "polite":
        os._exit(0)


for name in ("SIGTERM", "SIGINT"):
    signal.signal(signal.Signals[name], on_signal)
note("ready", os.environ["RANK"])
while True:
    time.sleep(1)
