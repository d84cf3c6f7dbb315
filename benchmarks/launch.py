"""How long workers take to start and to come back, beside torchrun, in one interleaved run.

Start: from the command to the moment the last of N workers has finished its first gloo all-reduce.
Recovery: from SIGKILL of one worker to the moment all workers have finished an all-reduce in their new group, under
``--max-restarts`` (everybody restarts). A run that does not come back is told apart by how it ended: *hung* (the
launcher still ran at the limit) or *gave up* (it ended by itself, with which exit code); one that never started
counts as neither. The worker is the same plain torch.distributed script for both, in a file of its own below.
Drop-in: the same recovery of a script that wraps a model in DistributedDataParallel and takes a step before it leaves
its mark, under ``--drop-in=ddp`` and without: what a restart costs beyond the warm start.

    python -m benchmarks.launch [--rounds 3] [--recoveries 20] [--torchrun-recoveries 5] [--drop-ins 5] [--workers 2 8]

torchrun's recoveries are fewer by default: one that hangs costs the whole limit. The counts are printed for both.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks._results import record

HUNG_AFTER = 30.0

WORKER = """
import os, sys, time
import torch, torch.distributed as dist

directory, stays = sys.argv[1], sys.argv[2] == "stay"
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{dist.get_rank()}"
with open(os.path.join(directory, name + ".part"), "w") as file:
    file.write(f"{time.time()} {os.getpid()}")
os.rename(os.path.join(directory, name + ".part"), os.path.join(directory, name))
while stays and not os.path.exists(os.path.join(directory, "end")):
    dist.all_reduce(x)
    time.sleep(0.005)
"""

STEP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
"""
WITH_STEP = WORKER.replace("name = ", STEP + "name = ", 1)


@dataclass(frozen=True)
class Recovery:
    """How one attempt ended: ``recovered``, ``hung``, ``gave up`` or ``never started``."""

    how: str
    seconds: float = float("nan")
    exit_code: int | None = None

    def __str__(self) -> str:
        if self.how == "recovered":
            return f"recovered in {self.seconds:.2f} s"
        if self.how == "hung":
            return f"hung (no group of all workers within {HUNG_AFTER:g} s, the launcher still ran)"
        return self.how + ("" if self.exit_code is None else f" (the launcher ended with code {self.exit_code})")


COMMANDS = {
    "phalanx": [sys.executable, "-m", "phalanx", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
DROP_IN = {"drop-in": [*COMMANDS["phalanx"], "--drop-in=ddp"], "as it is": COMMANDS["phalanx"]}


class Run:
    """One launched job and the marks that its workers leave."""

    def __init__(self, name: str, workers: int, *, stays: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-launch-"))
        script = self.directory / "worker.py"
        script.write_text(WITH_STEP if name in DROP_IN else WORKER)
        self.workers = workers
        self.log = open(self.directory / "log", "w")  # noqa: SIM115 - closed by end()
        words = ["--nproc-per-node", str(workers), "--max-restarts", "3" if stays else "0"]
        self.started = time.time()
        self.process = subprocess.Popen(
            [*{**COMMANDS, **DROP_IN}[name], *words, str(script), str(self.directory), "stay" if stays else "go"],
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

        atexit.register(self.abandon)

    def wait_marks(self, restart: int) -> list[tuple[float, int]] | None:
        """Time and pid of every worker of a generation once all are there; None when they do not come."""
        until = time.monotonic() + HUNG_AFTER
        names = [self.directory / f"{restart}-{rank}" for rank in range(self.workers)]
        while not all(name.exists() for name in names):
            if time.monotonic() > until or self.process.poll() is not None:
                if all(name.exists() for name in names):  # written just before the launcher ended
                    break
                return None
            time.sleep(0.002)
        marks = [name.read_text().split() for name in names]
        return [(float(seconds), int(pid)) for seconds, pid in marks]

    def abandon(self) -> None:
        """The benchmark itself ends early: its job shall not outlive it."""
        _kill_tree(self.process.pid)
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self, *, kill: bool) -> None:
        atexit.unregister(self.abandon)
        if kill:
            _kill_tree(self.process.pid)
        (self.directory / "end").touch()
        try:
            self.process.wait(HUNG_AFTER)
        except subprocess.TimeoutExpired:
            _kill_tree(self.process.pid)
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory)


def _kill_tree(pid: int) -> None:
    """SIGKILL to a process of ours and all its descendants, found before any of them dies."""
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                queue += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
    for each in found:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass


def time_start(name: str, workers: int) -> tuple[float, float]:
    """Seconds to the last worker's first all-reduce, and CPU seconds of the whole job: the latter do not depend on what
    else the machine does."""
    before = _cpu_of_children()
    run = Run(name, workers, stays=False)
    marks = run.wait_marks(0)
    run.end(kill=marks is None)
    seconds = max(seconds for seconds, _ in marks) - run.started if marks else float("nan")
    return seconds, _cpu_of_children() - before


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_recovery(name: str, workers: int, victim: int) -> Recovery:
    """Kill a worker and see whether everybody comes together again."""
    run = Run(name, workers, stays=True)
    first = run.wait_marks(0)
    if first is None:
        code = run.process.poll()
        run.end(kill=True)
        return Recovery("never started", exit_code=code)
    killed = time.time()
    os.kill(first[victim][1], signal.SIGKILL)
    second = run.wait_marks(1)
    code = run.process.poll()  # before end(), which kills what hangs
    run.end(kill=second is None)
    if second:
        return Recovery("recovered", max(seconds for seconds, _ in second) - killed)
    return Recovery("hung") if code is None else Recovery("gave up", exit_code=code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--recoveries", type=int, default=20, help="kills for phalanx")
    parser.add_argument("--torchrun-recoveries", type=int, default=5, help="kills for torchrun")
    parser.add_argument("--drop-ins", type=int, default=5, help="kills of a script with --drop-in, and without")
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8], help="sizes for the start")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"cores {os.cpu_count()}, load before {os.getloadavg()[0]:.1f}; seconds, median (min-max)")
    for workers in args.workers:
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        cpu: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(args.rounds):
            for name in COMMANDS:
                seconds, cpu_seconds = time_start(name, workers)
                times[name].append(seconds)
                cpu[name].append(cpu_seconds)
        _show(f"start of {workers} workers to first all-reduce", times, f"start/{workers}")
        _show(
            f"CPU seconds of a job of {workers} workers that does nothing else",
            cpu,
            f"processor time/{workers}",
        )
    if args.drop_ins:
        _compare_drop_in(args.drop_ins)
    if args.recoveries:
        _compare_recoveries({"phalanx": args.recoveries, "torchrun": args.torchrun_recoveries})
    print(f"load after {os.getloadavg()[0]:.1f}")
    return 0


def _compare_recoveries(kills: dict[str, int]) -> None:
    """Kill a worker so many times under each launcher, turn and turn about, and show times and counts."""
    ends: dict[str, list[Recovery]] = {name: [] for name in COMMANDS}
    for turn in range(max(kills.values())):
        for name in COMMANDS:
            if turn < kills[name]:
                ends[name].append(time_recovery(name, 2, turn % 2))
                print(f"  kill {turn + 1:2d} of rank {turn % 2}, {name:9s} {ends[name][-1]}", flush=True)
    times = {name: [end.seconds for end in found if end.how == "recovered"] for name, found in ends.items()}
    counts = {name: f"{len(times[name])} of {len(found)}" for name, found in ends.items()}
    title = "SIGKILL to all 2 workers in a working group again (of those that recovered)"
    _show(title, times, "kill", f"recovered {counts['phalanx']}, torchrun {counts['torchrun']}")
    for name, found in ends.items():
        count = Counter(end.how for end in found)
        others = ", ".join(f"{how} {count[how]}" for how in ("hung", "gave up", "never started"))
        print(f"  {name:9s} recovered {count['recovered']} of {len(found)}; {others}")


def _compare_drop_in(count: int) -> None:
    """Kill a worker of a script under ``--drop-in`` and without it, turn and turn about."""
    times: dict[str, list[float]] = {name: [] for name in DROP_IN}
    for turn in range(count):
        for name in DROP_IN:
            end = time_recovery(name, 2, turn % 2)
            print(f"  kill {turn + 1:2d} of rank {turn % 2}, {name:9s} {end}", flush=True)
            times[name].append(end.seconds)  # nan, if it did not come back: then so is the median
    medians = {name: statistics.median(values) for name, values in times.items()}
    more = medians["drop-in"] - medians["as it is"]
    print("SIGKILL to the first step of all 2 workers again, of a script with DistributedDataParallel")
    for name, values in times.items():
        print(f"  {name:9s} {medians[name]:6.2f} ({min(values):.2f}-{max(values):.2f})")
    print(f"  --drop-in takes {more:.2f} s more (goal: 0.1)", flush=True)
    low, high = min(times["drop-in"]), max(times["drop-in"])
    record("launch/kill drop-in", "s", medians["drop-in"], medians["as it is"], low=low, high=high)


def _show(title: str, times: dict[str, list[float]], case: str, note: str = "") -> None:
    print(title)
    medians = {}
    for name, values in times.items():
        medians[name] = statistics.median(values) if values else float("nan")
        spread = f"({min(values):.2f}-{max(values):.2f})" if values else ""
        print(f"  {name:9s} {medians[name]:6.2f} {spread}")
    print(f"  ratio     {medians['phalanx'] / medians['torchrun']:6.3f}x", flush=True)
    ours, theirs = times["phalanx"], times["torchrun"]
    if ours:
        other = medians["torchrun"] if theirs else None
        record(f"launch/{case}", "s", medians["phalanx"], other, low=min(ours), high=max(ours), note=note)


if __name__ == "__main__":
    sys.exit(main())
