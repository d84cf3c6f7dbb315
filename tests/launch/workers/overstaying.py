"""Rank 1 stays in a block with a timer for too long, once."""

import os
import time

from phalanx.launch import timer

timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=600):
    pass
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with timer.expires(after=0.1, scope="the long block"):
        time.sleep(600)
print("DONE", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
