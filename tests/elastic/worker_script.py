"""What the workers of the fault tests run: the job of ``elastic_training``, slowed down, its result written to a file.

``python worker_script.py DIR STEPS PACE``: DIR gets ``digest-WORKER``, ``made-WORKER`` (how many copies of gradients it
made room for), the logs and the saves. By files in DIR a test decides what must not be left to the speed of the
machine: ``closed`` keeps workers that start from joining, ``hold`` names the step that nobody may pass,
``miss-WORKER`` the step whose end a worker misses, ``die-WORKER`` the step after
whose commit it dies, ``send-WORKER`` the step in whose backward pass it dies, when half of its gradients are sent;
``enter-WORKER`` and ``pass-WORKER`` the step of a sharded job at whose commit point it dies, before and behind it;
``fail-WORKER`` says what a worker does to itself, once (``say TEXT`` only prints), and ``cut-WORKER`` that its
connections to the others end before every step. A worker that is held writes to ``asked-WORKER`` how many saves
it knows to be asked for. ``--copies=K`` shards the model; ``--save`` saves every 5 steps (``--save=N``: N), ``--gloo``
leaves shared memory alone, ``--overlap`` sends gradients while they come, ``--timeout=S`` is the group's. ``--verify``
has every step checked, and ``lie-WORKER`` says what a worker does wrong (``lies``); ``slow-WORKER`` says how many
seconds longer each of its batches takes, and ``--still`` leaves slots where they are all the same. ``--fingerprint=N``
takes one after every N steps. ``--spike=N`` makes the loss of step N explode, and goes back from there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lies
from elastic_training import make_job
from torch.nn import functional as F

from phalanx.comm.faults import kill_at, lose_result_at, play
from phalanx.comm.transports import _auto
from phalanx.elastic import Guard, Job, RunOptions, Saves, VerifySlots, _sharded_step
from phalanx.elastic.reduce._flat_layout import FlatLayout


def main() -> None:
    directory, num_steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    while (directory / "closed").exists():
        time.sleep(0.01)
    every = next((int(w.partition("=")[2] or 5) for w in sys.argv if w.startswith("--save")), 0)
    compared = next((int(w.partition("=")[2]) for w in sys.argv if w.startswith("--fingerprint=")), 0)
    saves = Saves(directory=directory / "saves", every=every) if every else None
    if "--gloo" in sys.argv:
        _auto.choose = lambda identities: _auto.TransportChoice("gloo", "the test says so")
    timeout = next((float(w.partition("=")[2]) for w in sys.argv if w.startswith("--timeout=")), 120.0)
    overlap = "--overlap" in sys.argv
    if overlap:
        of = FlatLayout.of
        FlatLayout.of = lambda *args: of(*args, bucket_bytes=512)
    spike = next((int(w.partition("=")[2]) for w in sys.argv if w.startswith("--spike=")), None)
    copies = next((int(w.partition("=")[2]) for w in sys.argv if w.startswith("--copies=")), None)
    job = make_job(
        copies=copies,
        run=RunOptions(
            log_dir=directory / "logs",
            progress=False,
            threads=1,
            verify=True,
            timeout=timeout,
            overlap=overlap,
            balance="--still" not in sys.argv,
        ),
        saves=saves,
        verify_slots=VerifySlots(every=1) if "--verify" in sys.argv else None,
        guard=Guard() if spike is None else Guard(spike=50.0, on_spike="rollback"),
    )
    for name in ("store", "job"):
        put(directory / name, os.environ.get(f"PHALANX_{name.upper()}", ""))
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    put(directory / f"pid-{job.worker_id}", f"{os.getpid()} {started}")
    for step in job.steps(max_steps=num_steps):
        hold(job, step.number, directory)
        lie = lies.Lie.of(directory / f"lie-{job.worker_id}")
        lies.before_step(job, lie, step.number)
        longer = seconds_in(directory / f"slow-{job.worker_id}")
        if spike is not None:
            job.saving.wait_idle()  # which save is the last good one must not be left to the speed of the disk
        with dying_in_the_middle(job, step.number, directory):
            for micro in step:
                output = lies.of_output(lie, step.number, micro.slot, job.model(micro.inputs))
                loss = F.cross_entropy(output, micro.targets)
                micro.backward(loss * 1000 if step.number == spike else loss)
                time.sleep(pace + longer)
        with missing_the_end(job, step.number, directory), dying_at_the_commit_point(job, step.number, directory):
            outcome = step.commit(max_grad_norm=1.0)
        if outcome:
            job.mean.update(job.model)
        if outcome and compared and not job.step % compared:
            found = job.fingerprint()
            if found is not None and job.is_writer:
                put(directory / f"fingerprint-{found.step}", f"{found.digest} of {found.num_workers}")
        if is_due(directory / f"die-{job.worker_id}", step.number):
            os.kill(os.getpid(), signal.SIGKILL)
    put(directory / f"made-{job.worker_id}", str(job.pool.num_made))
    put(directory / f"digest-{job.worker_id}", f"{job.step} {job.digest()}")


def put(path: Path, text: str) -> None:
    """Write a file that others read: there is never a half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def hold(job: Job, step: int, directory: Path) -> None:
    """Fail if told so, and stay before the step that may not be passed yet. A regroup passes: it needs a boundary."""
    if (directory / f"cut-{job.worker_id}").exists() and job.world_size > 1:
        reset(of_store=False)
    while True:
        fail(directory / f"fail-{job.worker_id}")
        signals = job.regrouping.coordinator.signals
        try:
            last = int((directory / "hold").read_text())
        except FileNotFoundError:
            return
        if signals.saves_asked:
            put(directory / f"asked-{job.worker_id}", str(signals.saves_asked))
        if step < last or signals.wish or signals.broken or job.regrouping.leave.requested:
            return
        job.regrouping.coordinator.report(job.step)
        time.sleep(0.01)


def seconds_in(path: Path) -> float:
    return float(path.read_text()) if path.exists() else 0.0


def is_due(wish: Path, step: int) -> bool:
    return wish.exists() and int(wish.read_text()) == step


def missing_the_end(job: Job, step: int, directory: Path) -> contextlib.AbstractContextManager[None]:
    """Lose the result of the step's last collective, if the test has written that down for this worker."""
    if not is_due(directory / f"miss-{job.worker_id}", step):
        return contextlib.nullcontext()
    return play(lose_result_at(job.rank, 0, name="all_gather_into_tensor"))


def dying_in_the_middle(job: Job, step: int, directory: Path) -> contextlib.AbstractContextManager[None]:
    """Die when the second bucket of gradients is about to be sent, if the test has written that down."""
    if not is_due(directory / f"send-{job.worker_id}", step):
        return contextlib.nullcontext()
    return play(kill_at(job.rank, 1, name="all_to_all"))


@contextlib.contextmanager
def dying_at_the_commit_point(job: Job, step: int, directory: Path) -> Iterator[None]:
    """Die when prepared, or when all are known to be prepared, if the test has written that down for this worker."""
    exchange = _sharded_step.exchange_verdict

    def exchange_or_die(*args: Any, **keywords: Any) -> Any:
        if is_due(directory / f"enter-{job.worker_id}", step):
            os.kill(os.getpid(), signal.SIGKILL)
        verdict = exchange(*args, **keywords)
        if is_due(directory / f"pass-{job.worker_id}", step):
            os.kill(os.getpid(), signal.SIGKILL)
        return verdict

    _sharded_step.exchange_verdict = exchange_or_die
    try:
        yield
    finally:
        _sharded_step.exchange_verdict = exchange


def fail(wish: Path) -> None:
    """Fail in the way that the test has written down for this worker, if it has."""
    if wish.exists():
        kind = wish.read_text()
        wish.unlink()
        if kind == "raise":
            raise RuntimeError("told to fail")
        if kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "exit":
            os._exit(3)
        if kind.startswith("say "):
            print(kind.removeprefix("say "), flush=True)
        if kind in ("reset", "reset store"):
            reset(of_store=kind == "reset store")


def reset(of_store: bool) -> int:
    """End this process's TCP connections under the feet of those who use them: to the store, or all the others."""
    port = int(os.environ["PHALANX_STORE"].rpartition(":")[2])
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:
            continue  # gone
        try:
            copy = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue  # no socket
        with copy:
            try:
                if copy.family == socket.AF_INET and (copy.getpeername()[1] == port) == of_store:
                    copy.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:
                continue  # not connected
    return count


if __name__ == "__main__":
    main()
