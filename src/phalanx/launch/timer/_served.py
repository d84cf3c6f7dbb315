"""Serves the timers of an agent's workers when the environment asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from phalanx.launch.timer.file_based_local_timer import FileTimerRequest, FileTimerServer

ENV_ENABLE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
ENV_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"

INTERVAL = 1.0
"""Seconds between two looks at the timers, where none is due sooner."""


def timer_server_from(
    environ: Mapping[str, str], run_id: str, folder: str, on_event: Callable[[str, FileTimerRequest | None], None]
) -> FileTimerServer | None:
    """Start the server of an agent, its pipe where ``TORCHELASTIC_TIMER_FILE`` says or in ``folder``; None: not asked
    for."""
    if environ.get(ENV_ENABLE_TIMER) != "1":
        return None
    path = environ.get(ENV_TIMER_FILE) or os.path.join(folder, "timers")
    server = FileTimerServer(path, run_id, INTERVAL, log_event=on_event)
    server.start()
    return server
