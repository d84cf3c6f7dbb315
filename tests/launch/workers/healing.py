"""A worker that survives its peers: sums ranks in steps, regroups when the generation is broken or wanted.

Usage: healing.py DIRECTORY STEPS [FAULT...]; writes lines "generation step rank size sum" to DIRECTORY/<worker id>.
Faults are "rank:step:what" and happen in generation 0 only; what is kill, raise, exit, segv, leave, hang or kill+R: it
kills rank R, then itself.
A file DIRECTORY/end ends all at the same step.
Who has finished says so in the store: a replacement of one that died after that has nobody to join and goes away.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from phalanx import protocol as m
from phalanx.comm import Group
from phalanx.comm.stores import connect, job_store
from phalanx.errors import CommError, PeerLost, StoreTimeout
from phalanx.launch import report_progress

torch.set_num_threads(1)


def fault(what: str, pids: list[int], store, generation: int, worker_id: str) -> None:
    if what.startswith("kill"):
        for rank in what.split("+")[1:]:
            os.kill(pids[int(rank)], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("told to fail")
    elif what == "exit":
        sys.exit(3)
    elif what == "segv":
        ctypes.string_at(0)
    elif what == "leave":
        store.set(m.leaving_key(generation, worker_id), b"{}")
        sys.exit(0)
    elif what == "hang":
        time.sleep(600)


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    faults = {tuple(map(int, f.split(":")[:2])): f.split(":")[2] for f in sys.argv[3:]}
    job, worker_id = os.environ[m.ENV_JOB], os.environ[m.ENV_WORKER_ID]
    root = connect(os.environ[m.ENV_STORE])
    store = job_store(root, job)
    store.set(m.regroups_key(worker_id), b"{}")
    generation = int(os.environ[m.ENV_GENERATION])
    step = 0
    with open(directory / worker_id, "a", buffering=1) as out:
        print(f"pid {os.getpid()}", file=out)
        while step < steps:
            members = m.Members.from_json(store.wait([m.members_key(generation)], 60)[0])
            mine = [w for w in members.workers if w.id == worker_id]
            if not mine:
                return  # told to go
            try:
                group = Group.create(
                    root,
                    mine[0].rank,
                    len(members.workers),
                    job=job,
                    generation=generation,
                    timeout=60,
                    backend="gloo",
                    interrupt=partial(_over, store, generation),
                )
                # Everybody goes on with the most advanced step.
                values = group.all_gather_values([step, os.getpid()])
                step = max(value[0] for value in values)
                pids = [value[1] for value in values]
                while step < steps:
                    what = faults.get((mine[0].rank, step)) if generation == 0 else None
                    if what:
                        fault(what, pids, store, generation, worker_id)
                    x = torch.tensor([float(mine[0].rank)])
                    group.all_reduce(x)
                    is_wanted = store.get(m.wanted_key(generation)) is not None
                    wishes = torch.tensor([float(is_wanted), float((directory / "end").exists())])
                    group.all_reduce(wishes)
                    print(generation, step, mine[0].rank, len(members.workers), int(x.item()), file=out)
                    step += 1
                    report_progress(step)
                    time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")))
                    if wishes[1]:
                        steps = step
                    if wishes[0]:
                        break
                group.close()
                if step < steps:
                    generation += 1
            except Finished:
                return
            except (CommError, StoreTimeout) as error:
                print("lost", generation, type(error).__name__, file=out)
                store.wait([m.broken_key(generation)], 60)
                generation += 1
        store.set("finished", b"{}")
        print("finished", generation, file=out)


class Finished(Exception):
    """The job is done."""


def _over(store, generation: int) -> Exception | None:
    if store.get("finished") is not None:
        return Finished()
    return PeerLost("broken") if store.get(m.broken_key(generation)) is not None else None


main()
