"""Offers expiration timers: a worker that overstays in a block of its own choosing is killed.

The agent of a ``phalanx run`` serves them when ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` is set:

>>> import os
>>> from phalanx.launch import timer
>>> timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))   # doctest: +SKIP
>>> with timer.expires(after=60):                                                   # doctest: +SKIP
...     exchange()
"""

from __future__ import annotations

from phalanx.launch.timer.api import (
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
    expires,
)
from phalanx.launch.timer.file_based_local_timer import FileTimerClient, FileTimerRequest, FileTimerServer
from phalanx.launch.timer.local_timer import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
