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
from phalanx.launch.rendezvous._store_records import read_count, read_record
from phalanx.protocol import CLOSED, NODES, RUNS, Closing, dump_count, job_prefix

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
    number = read_count(base, Signer(run_id, secret), RUNS) or 0
    return name_of_run(run_id, number), number


def join_run(store: Store, run_id: str, secret: bytes | None, *, grace: float) -> str:
    """Return the name of the run that a node of a job belongs to; opens another one if the newest is over."""
    base, signer = store.namespace(job_prefix(run_id)), Signer(run_id, secret)
    while True:
        name, number = find_run(store, run_id, secret)
        run = store.namespace(job_prefix(name))
        closing = read_record(run, Signer(name, secret), CLOSED, Closing)
        if closing is None:
            return name
        if not is_past(closing, len(run.items(NODES)), now=time.time(), grace=grace):
            return name
        after = signer.seal(RUNS, dump_count(number + 1))
        if base.compare_and_set(RUNS, base.get(RUNS), after):
            log.warning("job %r has ended before (%s); it is run anew", run_id, closing.reason)
