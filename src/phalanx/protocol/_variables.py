"""Names the environment variables by which an agent tells its workers where they are."""

from __future__ import annotations

ENV_STORE = "PHALANX_STORE"
"""URL of the job's store for ``phalanx.comm.stores.connect``: tcp://host:port, file:///dir, etcd://host:port."""
ENV_JOB = "PHALANX_JOB"
ENV_GENERATION = "PHALANX_GENERATION"
ENV_WORKER_ID = "PHALANX_WORKER_ID"
"""Unique among all workers the job ever has; kept by a worker through all its generations."""
ENV_ON_FAILURE = "PHALANX_ON_FAILURE"
"""``heal`` or ``restart``."""
ENV_REGROUP_TIMEOUT = "PHALANX_REGROUP_TIMEOUT"
"""Seconds that a worker waits for its place in the next group; see ``_timeouts.regroup_timeout``."""
ENV_EVENTS = "PHALANX_EVENTS_DIR"
"""Where the agent looks for the events of its workers; absent: nowhere."""
ENV_LIVE_LINE = "PHALANX_LIVE_LINE"
"""Present when the agent shows how far the job is, so that no worker need."""

ENV_LEAVE_SIGNAL = "PHALANX_LEAVE_SIGNAL"
"""The signal by which the agent asks a worker to leave at its next step boundary."""

ENV_POSITION_FILE = "PHALANX_POSITION_FILE"
"""Where a worker keeps its ``WorkPosition``."""

ENV_SECRET = "PHALANX_JOB_SECRET"
ENV_SECRET_FILE = "PHALANX_JOB_SECRET_FILE"
"""With either, agents and workers sign all records and refuse those that are not signed."""

ENV_EXIT_CODE = "PHALANX_EXIT_CODE"
"""Set in a worker when its script has ended, before functions registered with ``atexit`` run: the code it ends with."""
