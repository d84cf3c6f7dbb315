"""What watching costs a job, by turns with a job that nobody watches, and what 256 workers and 100,000 steps cost.

Three parts, all in CPU time, which other processes hardly change:

*Worker.* One worker trains a small model; runs of 25 steps with events and without take turns. What a step costs the
first worker more (its clock, the bytes of its collectives, the event of the step) is the median of the differences
between neighbours; others write less. It is alone in its process, as workers are: two simulated ones would also pay
for the interpreter lock that they share. (Of the line of times that it writes each second, which comes to less than
1 us for a step, only those show that half of the runs have.)
*Agent.* ``phalanx run`` with a page, two workers and a step each 20 ms: what the threads that only a page needs use of
one core while nobody looks, and what the agent's process uses more while somebody does. Looking and not looking take
turns within one agent, and only its own processor time counts: two agents differ by more than a page costs. A machine
whose cores are all busy loses that much of a step.
*Size.* The agent reads the lines of 256 workers and 100,000 steps, and makes the page of them; where there is a
Chromium, that shows it.

    python -m benchmarks.watch [--steps N] [--run N] [--jobs N] [--turns N] [--seconds S] [--fed N]
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tools.browser import Browser, find_chromium
from torch import nn

from benchmarks._results import record
from phalanx.comm import simulate
from phalanx.comm.group import _observe
from phalanx.elastic import Job, RunOptions
from phalanx.events import _event_types as types
from phalanx.events._lines import to_json
from phalanx.events._writer import EventLog
from phalanx.protocol import ENV_EVENTS
from phalanx.watch._hub import Hub
from phalanx.watch._prometheus import exposition
from phalanx.watch._report import with_details, write_report

WORKERS = 2
STEP = 0.02
"""Seconds of a step to which the cost is compared."""
FED_WORKERS = 256
PAGE_THREADS = ("phalanx-http", "phalanx-events", "phalanx-load", "phalanx-address")
LINE = 500
"""Steps that a worker tells in one line."""
LOOKS_EVERY = 2.0
"""Seconds after which a page that is open asks again."""
SETTLE = 1.5
"""Seconds after which an agent has noticed that nobody looks any more: its next event or look."""


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), index / 4096), index % 4


# -- a worker -----------------------------------------------------------------------------------------------------


def train(steps: int, run: int, folder: str) -> list[float]:
    """CPU seconds of a step: the mean of each run of steps, with events and without in turn.

    What a worker does for events is switched off for every other run, in the middle of the job: so that what the
    machine does falls on both alike.
    """
    means: list[float] = []
    nobody = EventLog(None)

    def work_on(group: Any) -> None:
        watching: Any = ()
        job = small_job(num_slots=1, run=RunOptions(progress=False, group=group))
        told, before = job.events, 0.0
        for step in job.steps(max_steps=(2 * (steps // (2 * run)) + 2) * run):
            number, place = divmod(step.number, run)
            if place == 0:
                now = time.thread_time()
                if number > 2:  # the first runs warm up
                    means.append((now - before) / run)
                watching = watching or _observe._observers
                job.events = job.clock._events = nobody if number % 2 else told
                job.clock._first = step.number  # else the gap would be told, in a line of its own
                _observe._observers = () if number % 2 else watching
                before = time.thread_time()
            for micro in step:
                micro.backward(nn.functional.cross_entropy(job.model(micro.inputs), micro.targets))
            step.commit()
        job.close()

    os.environ[ENV_EVENTS] = folder
    try:
        simulate(1, timeout=900.0).run(work_on)
    finally:
        del os.environ[ENV_EVENTS]
        _observe._observers = ()
    return means


def small_job(**options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), Rows(), slot_batch_size=4, seed=0, **options)


def worker_cost(steps: int, run: int) -> list[float]:
    """What a step takes the first worker more with events, of each two neighbouring runs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="phalanx-watch-") as folder:
        gc.collect()
        gc.freeze()
        means = train(steps, run, folder)
    return [on - off for on, off in zip(means[::2], means[1::2], strict=False)]


def middle(values: list[float]) -> tuple[float, float, float]:
    """The median, and between which two values it lies with 95% certainty (of the rounds that there are).

    >>> middle([float(value) for value in range(101)])
    (50.0, 40.0, 60.0)
    """
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    low, high = (int(len(values) / 2 + sign * reach) for sign in (-1, 1))
    return statistics.median(values), ordered[max(0, low)], ordered[min(len(values) - 1, high)]


# -- the agent ----------------------------------------------------------------------------------------------------


def work(ready: Path) -> None:
    """Train, as a worker of the watched job: a step each 20 ms, until it is stopped; the file tells of the 100th."""
    torch.set_num_threads(1)
    job = small_job(num_slots=WORKERS, run=RunOptions(progress=False))
    next_step = time.monotonic()
    for step in job.steps(max_steps=10**9):
        for micro in step:
            micro.backward(nn.functional.cross_entropy(job.model(micro.inputs), micro.targets))
        now = time.monotonic()
        next_step = max(next_step + STEP, now)
        time.sleep(next_step - now)
        step.commit()
        if step.number == 100:
            ready.touch()


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, with its threads that have ended (a tick of 10 ms would hide it)."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


def cpu_of_page(pid: int) -> float:
    """CPU seconds so far of an agent's threads that only a page needs."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(
        int((task / "schedstat").read_text().split()[0])
        for task in tasks
        if (task / "comm").read_text().strip() in PAGE_THREADS
    ) / 1e9  # fmt: skip


@contextmanager
def running(*flags: str) -> Iterator[tuple[int, str]]:
    """A job that has made a hundred steps; its agent's process and what it printed."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory(prefix="phalanx-watch-") as folder:
        output, ready = Path(folder) / "output", Path(folder) / "ready"
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        with output.open("wb") as file:
            agent = subprocess.Popen(
                [sys.executable, "-m", "phalanx", "run", "--standalone", f"--nproc-per-node={WORKERS}",
                 "--on-failure=heal", "--preload=phalanx.elastic", *flags, __file__, f"--work={ready}"],
                env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file,
            )  # fmt: skip
        try:
            until = time.monotonic() + 180.0
            while not ready.exists():
                if agent.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the job made no 100 steps within 180 s:\n{output.read_text()[-2000:]}")
                time.sleep(0.2)
            yield agent.pid, output.read_text()
        finally:
            agent.send_signal(signal.SIGTERM)
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def used(pid: int, seconds: float) -> tuple[float, float]:
    """What a process uses of one core, and its threads that only a page needs."""
    begin, before, page_before = time.monotonic(), cpu_of(pid), cpu_of_page(pid)
    time.sleep(seconds)
    passed = time.monotonic() - begin
    return (cpu_of(pid) - before) / passed, (cpu_of_page(pid) - page_before) / passed


def look(host: str, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", path)
    return connection.getresponse()


def follow(host: str, stopped: threading.Event) -> None:
    """Look at a page as an open browser does."""
    stream = look(host, "/events?kinds=worker_started,worker_failed,regrouped,saved,shut_down")
    while not stopped.wait(LOOKS_EVERY):
        look(host, "/api/v1/page").read()
    stream.close()


@contextmanager
def somebody(host: str) -> Iterator[None]:
    """Have somebody look at the page."""
    stopped = threading.Event()
    person = threading.Thread(target=follow, args=(host, stopped))
    person.start()
    try:
        yield
    finally:
        stopped.set()
        person.join()


def agent_cost(rounds: int, turns: int, seconds: float) -> tuple[list[float], list[float]]:
    """What agents use of one core for a page, in each turn: the threads of the page while nobody looks, and what the
    process uses more while somebody does than just before and after."""
    threads, looked_at = [], []
    for _ in range(rounds):
        with running("--dashboard=0") as (pid, output):
            found = re.search(r"shown at http://([^/\s]+)/", output)
            assert found, output
            before, page = used(pid, seconds)
            threads.append(page)
            for _ in range(turns):
                with somebody(found[1]):
                    seen, _ = used(pid, seconds)
                time.sleep(SETTLE)
                after, page = used(pid, seconds)
                threads.append(page)
                looked_at.append(seen - (before + after) / 2)
                before = after
    return threads, looked_at


# -- a large job --------------------------------------------------------------------------------------------------


def feed(hub: Hub, steps: int) -> None:
    """Give a hub the lines of a job with many workers, as it would read them from files."""
    workers = tuple(f"host{i // 8}.{i}" for i in range(FED_WORKERS))

    def tell(event: types.TrainingEvent) -> None:
        line = to_json(event)
        hub.add_record(json.loads(line), line)

    for rank, worker in enumerate(workers):
        tell(
            types.RoundFormed(
                worker=worker, time=1.0, generation=0, round=0, workers=workers, joined=workers, left=(), step=0,
                seconds=0.1, rank=rank, first_slot=rank, num_slots=1,
            )
        )  # fmt: skip
    micros = tuple(20_000 + 7 * i % 900 for i in range(LINE))
    for first in range(0, steps, LINE):
        now = 2.0 + first * STEP
        for worker in workers:
            tell(
                types.WorkerStepTimes(
                    worker=worker, time=now, step=first, compute=micros, wait=micros, data=micros,
                    collective_bytes={"all_to_all": 1 << 20, "all_gather_into_tensor": 1 << 20},
                )
            )  # fmt: skip
        for step in range(first, first + LINE):
            tell(
                types.StepCommitted(
                    worker=workers[0], time=now, step=step, epoch=0, loss=1.0, samples=64, generation=0, round=0
                )
            )


def cpu(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def shown_in_browser(data: dict[str, Any]) -> float:
    """Seconds until Chromium shows a page of this data, from the moment that it is asked to."""
    with tempfile.TemporaryDirectory(prefix="phalanx-watch-") as folder:
        write_report(Path(folder) / "page.html", data)
        with Browser(Path(folder) / "profile") as browser:
            browser.open(f"file://{folder}/page.html")
            browser.wait_for("document.body && document.body.dataset.shown")
            return float(browser.ask("performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1e3


# -- all of it ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=16_000, help="steps of a worker, with events and without")
    parser.add_argument("--run", type=int, default=25, help="steps in each turn")
    parser.add_argument("--jobs", type=int, default=2, help="jobs with a page")
    parser.add_argument("--turns", type=int, default=4, help="of looking and not looking, in each of them")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each turn, with somebody and with nobody who looks"
    )
    parser.add_argument("--fed", type=int, default=100_000, help="steps that the agent is told of")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    first = tell_worker(options.steps, options.run)
    tell_agent(options.jobs, options.turns, options.seconds, first)
    tell_size(options.fed)


def tell_worker(steps: int, run: int) -> float:
    """Measure a worker; the seconds that a step takes the first one more."""
    more = worker_cost(steps, run)
    value, low, high = (1e6 * one for one in middle(more))
    print(f"a step of the first worker, more with events: {value:.1f} us ({low:.1f} to {high:.1f})", flush=True)
    record("a step of the first worker, more", "us", value, low=low, high=high)
    return max(0.0, statistics.median(more))


def tell_agent(jobs: int, turns: int, seconds: float, first: float) -> None:
    """Measure an agent; what it and the first worker take of a step of 20 ms together."""
    quiet, more = agent_cost(jobs, turns, seconds)
    for name, values in (("page threads, while nobody looks", quiet), ("agent, more while somebody looks", more)):
        value, low, high = (100 * one for one in middle(values))
        print(f"{name}: {value:.2f}% of one core ({low:.2f} to {high:.2f})")
        record(name, "% of a core", value, low=low, high=high)
    page = statistics.median(quiet)
    for when, agent in (("nobody looks", page), ("somebody looks", page + max(0.0, statistics.median(more)))):
        share = 100 * (first / STEP + agent)
        print(f"of a step of {1e3 * STEP:.0f} ms on busy cores, while {when}: {share:.2f}%", flush=True)
        record(f"share of a step of 20 ms, while {when}", "%", share)


def tell_size(steps: int) -> None:
    """Measure what a large job costs the agent, and its page."""
    hub = Hub("fed", clock=lambda: 3000.0)
    fed = cpu(lambda: feed(hub, steps))
    each = fed / steps / FED_WORKERS
    print(f"the agent: {1e6 * each:.2f} us for a step of a worker, {fed:.1f} s for {steps:,} steps of 256 workers")
    record("agent, a step of a worker", "us", 1e6 * each)
    page = min(cpu(lambda: json.dumps(hub.view.page(3000.0))) for _ in range(5))
    size = len(json.dumps(hub.view.page(3000.0)))
    scrape = min(cpu(lambda: exposition(hub.view, 3000.0)) for _ in range(5))
    print(f"the page: {1e3 * page:.1f} ms, {size / 1000:.0f} KB; a scrape: {1e3 * scrape:.1f} ms")
    record("page of 256 workers", "ms", 1e3 * page)
    record("size of the page", "KB", size / 1000)
    record("scrape of 256 workers", "ms", 1e3 * scrape)
    if find_chromium():
        seconds = min(shown_in_browser(with_details(hub.view) | {"live": False}) for _ in range(3))
        print(f"Chromium shows it after {1e3 * seconds:.0f} ms")
        record("Chromium, page of 256 workers", "ms", 1e3 * seconds)


if __name__ == "__main__":
    main()
