"""What the workers of the fault storm run: training with saves, an evaluation per epoch, and what follows the loop.

``python storm_script.py DIR STEPS PACE``. At named points a worker looks into ``DIR/faults`` for a fault that is
laid out there: ``NUMBER.POINT.STEP.KIND`` is for the first worker that comes to the point at that step or later. It
takes the file (into ``DIR/struck``, so that nobody else does) and hurts itself. The points are those where a worker
was once lost in silence: ``start``, ``join``, ``send``, ``receive``, ``micro``, ``commit``, ``save``, ``evaluate``,
``last``, ``after`` and ``end``. The kinds: ``kill``; ``stop`` (SIGSTOP, and SIGCONT after longer than a collective
may wait); ``reset`` (every TCP connection of the process is shut down). As in ``worker_script``, ``DIR/hold`` names
the step that nobody may pass. ``--gloo`` leaves shared memory alone, ``--machine=NAME`` takes this machine for another,
``--over=DEVICE`` names the network that workers exchange data over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from elastic_training import Pictures, make_job
from torch.nn import functional as F
from worker_script import hold, put

from phalanx.comm.failure import _liveness
from phalanx.comm.transports import _auto
from phalanx.elastic import Job, RunOptions, Saves
from phalanx.elastic.checkpoint import _save_writer
from phalanx.elastic.membership import _sync

TIMEOUT = 4.0
"""Seconds that a collective waits for a worker that lives; a stopped one stays stopped for longer."""
DIRECTORY = Path(sys.argv[1])


def main() -> None:
    num_steps, pace = int(sys.argv[2]), float(sys.argv[3])
    options = dict(word.partition("=")[::2] for word in sys.argv[4:])
    if "--gloo" in options:
        _auto.choose = lambda identities: _auto.Choice("gloo", "the test says so")
    if "--machine" in options:
        _liveness._machine = lambda: options["--machine"]
    if "--over" in options:
        os.environ["GLOO_SOCKET_IFNAME"] = options["--over"]
    point("start", 0)
    job = make_job(
        length=96,
        run=RunOptions(log_dir=DIRECTORY / "logs", progress=False, threads=1, verify=True, timeout=TIMEOUT),
        saves=Saves(directory=DIRECTORY / "saves", every=4),
    )
    for name in ("store", "job"):
        put(DIRECTORY / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    watch(job)
    point("join", 0)
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, DIRECTORY)
        for micro in step:
            point("micro", step.number)
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            time.sleep(pace)
        point("last" if step.number == num_steps - 1 else "commit", step.number)
        if step.commit(max_grad_norm=1.0):
            job.mean.update(job.model)
            if step.is_last_of_epoch:
                evaluate(job)
    point("after", job.step)
    score = evaluate(job)
    if job.rank == 0:
        put(DIRECTORY / "result", f"{job.step} {job.digest()} {score!r}")
    put(DIRECTORY / f"digest-{job.worker_id}", f"{job.step} {job.digest()} {score!r}")
    point("end", job.step)


def evaluate(job: Job) -> float:
    def loss(batch):
        point("evaluate", job.step)
        return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

    return job.evaluate(Pictures(40), loss, batch_size=8)["loss"]


def watch(job: Job) -> None:
    """Make points of the moments inside the library."""

    def before(name, function):
        def wrapped(*args, **kwargs):
            point(name, job.step)
            return function(*args, **kwargs)

        return wrapped

    _sync.send_state = before("send", _sync.send_state)
    _sync.receive_state = before("receive", _sync.receive_state)
    _save_writer.write_save = before("save", _save_writer.write_save)


def point(name: str, step: int) -> None:
    for path in sorted((DIRECTORY / "faults").glob(f"*.{name}.*")):
        _, _, at, kind = path.name.split(".")
        if step >= int(at) and take(path):
            hurt(kind)


def take(path: Path) -> bool:
    try:
        path.rename(DIRECTORY / "struck" / path.name)
    except FileNotFoundError:
        return False  # another worker was faster
    return True


def hurt(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        wake = f"sleep {TIMEOUT * 2}; kill -CONT {os.getpid()}"
        os.posix_spawn("/bin/sh", ["sh", "-c", wake], {"PATH": os.environ["PATH"]})
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        for fd in os.listdir("/proc/self/fd"):
            reset(int(fd))


def reset(fd: int) -> None:
    """Shut a connection down as a network that lost it would; other files are left alone."""
    try:
        connection = socket.socket(fileno=os.dup(fd))
    except OSError:
        return  # not a socket, or gone
    with connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            try:
                connection.getpeername()  # one that listens is no connection
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is not connected any more


if __name__ == "__main__":
    main()
