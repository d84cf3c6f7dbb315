"""Says for whom a node waits: how many, where, and how those are started.

Owns the words and when they are due; nothing here waits by itself except the thread of ``saying``. A job of which a
part is missing looks exactly like one that hangs, so it says so after a second, and then less and less often.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phalanx.comm import _background as background
from phalanx.launch.rendezvous._decide import Rules

log = logging.getLogger(__name__)

DELAYS = (1.0, 15.0, 60.0)
"""Seconds of waiting after which a line is due; later ones come at the last interval."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def due_after(num_lines: int, delays: Sequence[float] = DELAYS) -> float:
    """Return how long a node has waited when its next line is due, of which it has said some already.

    >>> [due_after(n) for n in range(5)]
    [1.0, 15.0, 60.0, 120.0, 180.0]
    """
    if num_lines < len(delays):
        return delays[num_lines]
    return delays[-1] * (num_lines - len(delays) + 2)


def how_to_start(backend: str, url: str, run_id: str, rules: Rules, fixed_rank: int = -1, settings: str = "") -> str:
    """Return the command with which another node joins this job. ``fixed_rank``: of the one that says so;
    ``settings``: what all nodes have to be told.

    >>> how_to_start("c10d", "tcp://node0:29400", "job7", Rules(min_nodes=2, max_nodes=4))
    'phalanx run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id job7 ...'
    """
    nodes = str(rules.min_nodes)
    if rules.max_nodes != rules.min_nodes:
        nodes += f":{rules.max_nodes}"
    place = url.partition("://")[2]
    if backend == "static":
        host, _, port = place.rpartition(":")
        rank = str(1 - fixed_rank) if rules.max_nodes == 2 else "RANK"
        return f"phalanx run --nnodes {nodes} --node-rank {rank} --master-addr {host} --master-port {port} ..."
    told = f" --rdzv-conf {settings}" if settings else ""
    where = f"--rdzv-backend {backend} --rdzv-endpoint {place} --rdzv-id {run_id}{told}"
    return f"phalanx run --nnodes {nodes} {where} ..."


def waiting_line(
    backend: str,
    url: str,
    run_id: str,
    rules: Rules,
    *,
    present: Sequence[str],
    fixed_rank: int = -1,
    is_spare: bool = False,
    is_first: bool = True,
    settings: str = "",
) -> str:
    """Return what a node that waits for a generation says. ``present``: the ids of all nodes that are there."""
    if is_spare:
        return f"this node is a spare: job {run_id!r} has its {rules.max_nodes} node(s); it waits to replace one"
    missing = rules.min_nodes - len(present)
    if missing > 0:
        place = url.partition("://")[2]
        return (
            f"waiting for {missing} more node{'s' if missing > 1 else ''} at {place} ({len(present)} of "
            f"{rules.min_nodes} there: {', '.join(sorted(present)[:8])}); start there: "
            f"{how_to_start(backend, url, run_id, rules, fixed_rank, settings)}{_reach(backend, place)}"
        )
    if is_first:
        return (
            f"{len(present)} node(s) are there, up to {rules.max_nodes} may come: the job begins "
            f"{rules.last_call:g} s after the last that was needed (last_call_timeout)"
        )
    return "waiting for nodes of the last generation that still stop their workers"


def _reach(backend: str, place: str) -> str:
    host = place.rpartition(":")[0].strip("[]")
    if backend not in ("c10d", "static") or host not in LOOPBACK:
        return ""
    flag = "--master-addr" if backend == "static" else "--rdzv-endpoint"
    return f" (only this machine reaches {host}: with other machines give {flag} an address that they reach)"


@contextmanager
def saying(line: str, delays: Sequence[float] = DELAYS) -> Iterator[None]:
    """Say a line now and then as long as the block, which waits inside a call, lasts."""
    is_over = threading.Event()

    def say() -> None:
        num_lines, waited = 0, 0.0
        while not is_over.wait(due_after(num_lines, delays) - waited):
            waited = due_after(num_lines, delays)
            num_lines += 1
            log.warning("%s", line)

    thread = background.start(say, "phalanx-waiting", on_failure=lambda error: log.warning("%s", line))
    try:
        yield
    finally:
        is_over.set()
        thread.join()
