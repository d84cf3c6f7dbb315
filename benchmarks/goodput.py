"""What is left of a job's time when a worker is killed every 5, 15, 60 s: phalanx, torchrun with torch DDP, torchft.

Each contender runs the same work (``_goodput_work``) on four workers, one contender after the other for each
distance of failures, in changing order. Once it is at full size its undisturbed pace is measured, and again after the
last failure, if it is at full size soon (the machine's own pace moves by a tenth within minutes, which one look takes
for goodput). Between the two SIGKILL goes to a random worker by the clock, whether or not the last one has been got
over. *Goodput* is the work that counts and was
not there before, in the window, over what the undisturbed pace would have made of it: repeated steps count once, a
job that has shrunk makes less. torchrun's script, and phalanx's job, save every ``--save-every`` steps; torchrun's goes
on from its newest save. A job without progress for ``LIMIT`` seconds is started anew, from its newest save, and that
is counted. torchft is measured if it can be imported, here or in the environment of ``--torchft PYTHON``; its workers
are started anew by this process, at once, without torchrun, and what it computes with fewer workers counts as the
samples that it has. A distance that is named several times is measured as often, and the median counts, with its
extremes; who is named by ``--once`` takes part in the first of them only.

    python -m benchmarks.goodput [--every 5 15 60] [--slot-ms 10] [--save-every 50] [--of phalanx torchrun]

``make goodput`` runs all of it, in half an hour, on a machine that has nothing else to do: torchft in an environment of
its own, and five turns of a failure every 15 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _goodput_work as work
from benchmarks._results import record
from benchmarks._turns import disturbance_told
from phalanx.watch import goodput
from phalanx.watch._files import read_job_events

UNDISTURBED = 6.0
"""Seconds whose pace is the measure."""
LIMIT = 20.0
START_LIMIT = 90.0
MIN_WINDOW, MIN_FAILURES = 3 * LIMIT, 3
"""Long enough that a job which hangs at the first failure is started anew within it."""


LIGHTHOUSE = """
import os, sys, time
from torchft._torchft import LighthouseServer
server = LighthouseServer(
    bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20, heartbeat_timeout_ms=500
)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(server.address())
os.rename(sys.argv[1] + ".part", sys.argv[1])
while True:
    time.sleep(1)
"""
"""torchft's coordinator, in a process of its own: it tells every step on standard output."""


class Mark(NamedTuple):
    """At ``time`` the job had so many slots of work behind it, and so many workers."""

    time: float
    work: int
    size: int


class Window(NamedTuple):
    """What one contender did under failures."""

    goodput: float
    step: float
    """Seconds of an undisturbed step."""
    num_failures: int
    num_starts: int
    """How often the job had to be started anew."""
    account: str = ""


def window_of(every: float) -> float:
    """How long a distance of failures is measured; the k-th failure comes in the middle of the k-th distance.

    >>> window_of(5.0), window_of(15.0), window_of(60.0)
    (60.0, 60.0, 180.0)
    """
    return every * max(MIN_FAILURES, round(MIN_WINDOW / every))


def pace_of(marks: Sequence[Mark], *looks: tuple[float, float]) -> float:
    """Slots a second in some stretches of time together, each between the first and the last mark in it.

    >>> marks = [Mark(0.0, 0, 4), Mark(1.0, 32, 4), Mark(3.0, 96, 4), Mark(9.0, 999, 4), Mark(10.0, 1095, 4)]
    >>> pace_of(marks, (0.5, 4.0)), pace_of(marks, (0.5, 4.0), (9.0, 10.0))
    (32.0, 53.333333333333336)
    """
    work = seconds = 0.0
    for begin, end in looks:
        inside = [mark for mark in marks if begin <= mark.time <= end]
        work += inside[-1].work - inside[0].work
        seconds += inside[-1].time - inside[0].time
    return work / seconds


def work_at(marks: Sequence[Mark], moment: float, pace: float, step: int) -> float:
    """How much work was done at a moment: what was committed, and the part of a step that the pace makes of the rest.

    >>> work_at([Mark(0.0, 32, 4), Mark(1.0, 64, 4)], 1.5, pace=32.0, step=32)
    80.0
    """
    before = [mark for mark in marks if mark.time <= moment]
    latest = max(before, key=lambda mark: mark.work)
    return latest.work + min(float(step), (moment - latest.time) * pace)


class NotStarted(RuntimeError):
    """A contender did not come to its first step with all workers."""


class Contender:
    """One way of running the work, started in a directory of its own."""

    def __init__(self, name: str, slot_seconds: float, save_every: int, python: str = sys.executable) -> None:
        self.name = name
        self._python = python
        self.directory = Path(tempfile.mkdtemp(prefix=f"phalanx-goodput-{name}-"))
        self._words = [str(Path(work.__file__)), name, str(self.directory), str(slot_seconds), str(save_every)]
        self._log = (self.directory / "log").open("ab")
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        self._environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._launched: list[subprocess.Popen[bytes]] = []

    def command(self) -> list[str]:
        python = [self._python, "-m"]
        common = [f"--nproc-per-node={work.SIZE}", "--max-restarts=10000"]
        if self.name == "phalanx":
            ours = ["--on-failure=heal", "--preload=torch._dynamo,phalanx.elastic", f"--log-dir={self.directory}"]
            return [*python, "phalanx", "run", *ours, *common, *self._words]
        return [*python, "torch.distributed.run", "--standalone", *common, *self._words]

    def start(self) -> None:
        self._launched = [self._launch(self.command())]

    def _launch(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env={**self._environment, **environment})

    def marks(self) -> list[Mark]:
        found = []
        for path in self.directory.glob("marks-*"):
            lines = path.read_text().splitlines(keepends=True)
            found += [
                Mark(float(t), int(n), int(s)) for t, n, s in (line.split() for line in lines if line[-1] == "\n")
            ]
        return sorted(found)

    def alive(self) -> list[int]:
        """Workers that run and have come so far as to say so."""
        signed = {int(path.name[4:]): path.read_text() for path in self.directory.glob("pid-*")}
        return sorted(pid for pid, when in signed.items() if when and work.started(pid) == when)

    def stop(self) -> None:
        """End the launchers, which end their workers, and every worker that said its pid; nothing else."""
        for process in self._launched:
            process.terminate()
        for process in self._launched:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.stop()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class TorchftContender(Contender):
    """Workers that are replica groups of their own, and a thread that starts who has died at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        address = self.directory / "lighthouse"
        address.unlink(missing_ok=True)
        self._lighthouse = self._launch([self._python, "-c", LIGHTHOUSE, str(address)])
        until = time.monotonic() + START_LIMIT
        while not address.exists():
            if time.monotonic() > until or self._lighthouse.poll() is not None:
                raise NotStarted(f"torchft's lighthouse did not start:\n{_log_of(self)}")
            time.sleep(0.05)
        self._address = address.read_text()
        self._stopped.clear()
        self._launched = [self._replica(number) for number in range(work.SIZE)]
        self._thread = threading.Thread(target=self._replace, daemon=True)
        self._thread.start()

    def _replica(self, number: int) -> subprocess.Popen[bytes]:
        words = {"TORCHFT_LIGHTHOUSE": self._address, "REPLICA_GROUP_ID": str(number)}
        return self._launch([self._python, *self._words], **words)

    def _replace(self) -> None:
        while not self._stopped.wait(0.02):
            for number, process in enumerate(self._launched):
                if process.poll() is not None:
                    self._launched[number] = self._replica(number)

    def stop(self) -> None:
        if self._lighthouse is not None:
            if self._thread is not None:
                self._stopped.set()
                self._thread.join()
            super().stop()
            self._lighthouse.kill()
            self._lighthouse.wait()
            self._lighthouse = self._thread = None


def wait_for_full_size(contender: Contender, since: float, limit: float = START_LIMIT) -> bool:
    """Wait until all workers make steps together."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if any(mark.time > since and mark.size == work.SIZE for mark in contender.marks()):
            return True
        time.sleep(0.1)
    return False


def look(seconds: float) -> tuple[float, float]:
    """Let a job run undisturbed; when that began and ended."""
    begin = time.time()
    time.sleep(seconds)
    return begin, time.time()


def measure(contender: Contender, every: float, chance: random.Random) -> Window:
    """Run a job, first undisturbed, then under failures."""
    contender.start()
    if not wait_for_full_size(contender, 0.0):
        raise NotStarted(f"{contender.name} was not at full size in {START_LIMIT:g} s:\n{_log_of(contender)}")
    time.sleep(1.0)  # connections and caches
    looks = [look(UNDISTURBED)]
    now = looks[0][1]
    length, num_starts = window_of(every), 0
    failures = [now + every * (k + 0.5) for k in range(round(length / every))]
    num_failures, end = 0, now + length
    started = now
    while (moment := time.time()) < end:
        if failures and moment >= failures[0]:
            failures.pop(0)
            if alive := contender.alive():  # one that is being started is spared
                os.kill(chance.choice(alive), signal.SIGKILL)
                num_failures += 1
        marks = contender.marks()
        if moment - max(marks[-1].time, started) > LIMIT:
            contender.stop()
            contender.start()
            num_starts, started = num_starts + 1, time.time()
        time.sleep(max(0.0, min(0.25, (failures[0] if failures else end) - time.time())))
    if wait_for_full_size(contender, end, LIMIT):
        time.sleep(1.0)
        looks.append(look(UNDISTURBED))
    marks = contender.marks()
    pace = pace_of(marks, *looks)
    gained = work_at(marks, end, pace, work.SLOTS) - work_at(marks, now, pace, work.SLOTS)
    contender.stop()
    account = str(goodput(read_job_events(contender.directory))) if contender.name == "phalanx" else ""
    return Window(gained / (pace * length), work.SLOTS / pace, num_failures, num_starts, account)


def _log_of(contender: Contender) -> str:
    return (contender.directory / "log").read_text(errors="replace")[-2000:]


NAMES = ("phalanx", "torchrun", "torchft")


def has_torchft(python: str) -> bool:
    return subprocess.run([python, "-c", "import torchft"], capture_output=True).returncode == 0


def rounds_of(every: Sequence[float], names: Sequence[str], once: Sequence[str]) -> list[tuple[float, list[str]]]:
    """Return who is measured, in which order, at each of these distances.

    >>> rounds_of([15.0, 15.0, 60.0], ["a", "b", "c"], once=["c"])
    [(15.0, ['a', 'b', 'c']), (15.0, ['b', 'a']), (60.0, ['c', 'a', 'b'])]
    """
    found = []
    for number, distance in enumerate(every):
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        found.append((distance, [name for name in order if name not in once or distance not in every[:number]]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--every", type=float, nargs="+", default=[5.0, 15.0, 60.0])
    parser.add_argument("--of", nargs="+", default=NAMES, choices=NAMES, help="leave others out")
    parser.add_argument("--once", nargs="+", default=(), choices=NAMES, help="measured once at each distance")
    parser.add_argument(
        "--torchft", default=sys.executable, metavar="PYTHON", help="of an environment that has torchft"
    )
    parser.add_argument("--slot-ms", type=float, default=10.0)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are stopped even then
    names, chance = list(options.of), random.Random(0)
    if "torchft" in names and not has_torchft(options.torchft):
        names.remove("torchft")
        print(f"torchft cannot be imported by {options.torchft}: without it (make goodput has it)", flush=True)
    found: dict[float, dict[str, list[Window]]] = {}
    with disturbance_told():
        for every, order in rounds_of(options.every, names, options.once):
            for name in order:
                words = (name, options.slot_ms / 1e3, options.save_every)
                job = TorchftContender(*words, options.torchft) if name == "torchft" else Contender(*words)
                with contextlib.closing(job) as contender:
                    try:
                        window = measure(contender, every, chance)
                    except NotStarted as error:
                        if name == "phalanx":
                            raise
                        print(f"a failure every {every:3g} s  {error}", flush=True)
                        continue
                found.setdefault(every, {}).setdefault(name, []).append(window)
                show(name, every, window)
    for every, windows in found.items():
        keep(windows, every)


def show(name: str, every: float, window: Window) -> None:
    print(
        f"a failure every {every:3g} s  {name:9s} goodput {100 * window.goodput:5.1f}%  {window.num_failures} kills, "
        f"started anew {window.num_starts} times, undisturbed step {1e3 * window.step:.1f} ms"
        + (f"; its own account: {window.account}" if window.account else ""),
        flush=True,
    )


def keep(found: dict[str, list[Window]], every: float) -> None:
    """Record the shares that are lost, medians of all turns: less is better."""
    ours = found.get("phalanx")
    if ours is None:
        return
    lost = [1 - window.goodput for window in ours]
    for name, windows in found.items():
        if name == "phalanx":
            continue
        kills = f"kills {sum(one.num_failures for one in ours)}, {sum(one.num_failures for one in windows)}"
        record(
            f"goodput/lost/{every:g} s/{name}",
            "of time",
            statistics.median(lost),
            statistics.median(1 - window.goodput for window in windows),
            **({"low": min(lost), "high": max(lost)} if len(lost) > 1 else {}),
            note=f"{kills}; started anew {sum(one.num_starts for one in windows)} times",
        )
        steps = [statistics.median(window.step for window in each) for each in (ours, windows)]
        record(f"goodput/step/{every:g} s/{name}", "s", *steps)


if __name__ == "__main__":
    main()
