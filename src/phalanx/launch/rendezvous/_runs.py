"""Finds the run of a job that a node belongs to, where the store outlives the agents (``file``, ``etcd``).

The records of a job that has ended stay in such a store. A node that comes while it ends, or a moment later, is late
and finds the job closed: it has nothing to do. Who comes later, with nobody of the job left, wants to run it again:
that opens another *run*, whose records lie under another name, so that nothing of the earlier one is ever read. A job
that failed can be run again at once. One that was never closed (all agents were killed) is not over: it goes on.
"""

from __future__ import annotations

import logging
import time

from phalanx.comm.stores._interface import Store
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous import _records as records
from phalanx.launch.rendezvous._records import Closing
from phalanx.protocol import job_prefix

log = logging.getLogger(__name__)


def name_of_run(run_id: str, number: int) -> str:
    """
    >>> name_of_run("job7", 0), name_of_run("job7", 2)
    ('job7', 'job7~2')
    """
    return f"{run_id}~{number}" if number else run_id


def is_past(closing: Closing, num_live: int, *, now: float, grace: float) -> bool:
    """Return whether a job that was closed is a thing of the past, so that whoever comes wants another run.

    >>> is_past(Closing(reason="", outcome="succeeded", time=100.0), 0, now=110.0, grace=30.0)
    False
    """
    if num_live:
        return False
    return closing.outcome == "failed" or abs(now - closing.time) >= grace


def find_run(store: Store, run_id: str, secret: bytes | None) -> tuple[str, int]:
    """Return the name of the newest run of a job, and its number. ``store`` is the whole one."""
    base = store.namespace(job_prefix(run_id))
    value = base.get(records.RUNS)
    record = None if value is None else Signer(run_id, secret).open_trusted(records.RUNS, value)
    number = int(record) if record is not None and record.isdigit() else 0
    return name_of_run(run_id, number), number


def join_run(store: Store, run_id: str, secret: bytes | None, *, grace: float) -> str:
    """Return the name of the run that a node of a job belongs to; opens another one if the newest is over."""
    base, signer = store.namespace(job_prefix(run_id)), Signer(run_id, secret)
    while True:
        name, number = find_run(store, run_id, secret)
        run = store.namespace(job_prefix(name))
        value = run.get(records.CLOSED)
        record = None if value is None else Signer(name, secret).open_trusted(records.CLOSED, value)
        if record is None:
            return name
        closing = Closing.from_json(record)
        if not is_past(closing, len(run.items(records.NODES)), now=time.time(), grace=grace):
            return name
        before = base.get(records.RUNS)
        after = signer.seal(records.RUNS, str(number + 1).encode())
        if base.compare_and_set(records.RUNS, before, after):
            log.warning("job %r has ended before (%s); it is run anew", run_id, closing.reason)
