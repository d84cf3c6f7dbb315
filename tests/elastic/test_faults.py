"""Workers die, hang, leave and join in real processes; the weights have the bits of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import NUM_STEPS, Cluster

from phalanx.launch.events import JobWentBack, WorkerHung, read_events
from phalanx.watch import goodput
from phalanx.watch._files import read_job_events

pytestmark = pytest.mark.timeout(400)

HOLD = 20
"""Nobody goes further before the test has done what it does to the job."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started = []

    def begin(num_workers, **options):
        directory = tmp_path / f"job{len(started)}"
        started.append(Cluster(directory, num_workers, NUM_STEPS, hold=HOLD, **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def test_a_killed_worker_is_replaced_and_nothing_is_lost(start, undisturbed):
    cluster = start(3)
    cluster.wait_step(10)
    first, second, third = cluster.pids()
    cluster.close_door()
    cluster.signal(second)
    cluster.wait_until(lambda: [r for r in cluster.events("regrouped") if r["left"]], "regroup of the survivors")
    survived = next(r for r in cluster.events("regrouped") if r["left"])
    assert survived["workers"] == [first, third], "survivors did not wait for the replacement"
    cluster.open_door()
    cluster.wait_workers(3)
    cluster.release()
    verdict = cluster.finish()
    assert verdict.num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}


def test_who_misses_the_end_of_a_step_that_others_have_applied_takes_it_over(start, undisturbed):
    cluster = start(3)
    cluster.wait_step(10)
    _, second, third = cluster.pids()
    for what, worker in (("miss", second), ("die", third)):
        (cluster.directory / f"{what}-{worker}").write_text(str(HOLD + 2))
    cluster.release()
    cluster.finish()
    assert cluster.digests() == {undisturbed}
    received = [(e["worker"], e["step"]) for e in cluster.events("received") if e["step"] == HOLD + 3]
    assert (second, HOLD + 3) in received


@pytest.mark.parametrize("kind", ["raise", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("segv", "exit"))])
def test_a_worker_that_fails_by_itself_is_replaced_from_the_standby(start, undisturbed, kind):
    cluster = start(2, standby="1")
    cluster.wait_step(10)
    _, second = cluster.pids()
    wish = cluster.directory / f"fail-{second}"
    (cluster.directory / "wish").write_text(kind)
    (cluster.directory / "wish").rename(wish)
    cluster.wait_until(
        lambda: [r for r in cluster.events("regrouped") if r["left"] == [second]], "regroup of the survivor"
    )
    cluster.wait_workers(2)
    cluster.release()
    cluster.finish(tracebacks=["RuntimeError: told to fail"] if kind == "raise" else [])
    assert cluster.digests() == {undisturbed}


def test_rank_0_and_another_worker_killed_at_once(start, undisturbed):
    cluster = start(3)
    cluster.wait_step(10)
    first, second, _ = cluster.pids()
    cluster.signal(first)
    cluster.signal(second)
    cluster.release()
    cluster.finish()
    assert cluster.digests() == {undisturbed}


def test_a_stopped_worker_is_ejected_and_replaced_and_the_account_has_its_hang(start, tmp_path, undisturbed):
    logs = tmp_path / "job0" / "logs"  # the agent's events beside the workers'
    cluster = start(
        3, hang_timeout="3", max_restarts="100", log_dir=str(logs)
    )  # who starts slowly may be taken for hung
    cluster.wait_until(lambda: cluster.step() >= 10 and len(cluster.pids()) > 1, "step 10")
    stopped = list(cluster.pids())[1]
    cluster.signal(stopped, signal.SIGSTOP)
    cluster.wait_until(lambda: stopped not in cluster.pids(), "the stopped worker's end")
    cluster.release()
    cluster.finish()
    assert cluster.digests() == {undisturbed}
    assert "it is stopped (by SIGSTOP" in cluster.text()
    events = list(read_job_events(logs))
    hangs = [event for event in events if isinstance(event, WorkerHung)]
    assert stopped in [event.worker_id for event in hangs]
    account = goodput(events)
    assert sum(account.parts.values()) == account.total
    assert account.parts["hang"] >= 1e6 * 3 * len(hangs) * 0.999
    assert account.num_failures >= len(hangs)


def test_a_worker_joins_and_another_leaves_politely(start, undisturbed):
    cluster = start(2)
    cluster.wait_step(5)
    cluster.resize(3)
    cluster.wait_workers(3)
    leaver = next(iter(cluster.pids()))
    cluster.signal(leaver, signal.SIGTERM)
    cluster.wait_until(lambda: leaver not in cluster.pids(), "the leaver's end")
    cluster.release()
    verdict = cluster.finish()
    assert cluster.digests() == {undisturbed}
    assert [event["worker"] for event in cluster.events("left")] == [leaver]
    assert verdict.num_dropped == 0, "nobody died: no step had to be computed twice"


def test_when_all_die_the_job_resumes_from_its_last_save(start, undisturbed, tmp_path):
    cluster = start(2, script_flag="--save", log_dir=str(tmp_path / "agent"))
    cluster.wait_until(lambda: any(e["step"] >= 10 for e in cluster.events("saved")), "a save")
    cluster.close_door()  # a replacement of the first could otherwise take over from the second
    for worker in cluster.pids():
        cluster.signal(worker)
    cluster.open_door()
    cluster.release()
    cluster.finish()
    assert cluster.digests() == {undisturbed}
    (resumed,) = [event["step"] for event in cluster.events("resumed")]
    assert resumed >= 10
    for event in cluster.events("went_back"):  # unless they died in the moment of a save
        line = f"the job goes back from step {event['before']} to step {resumed}, its newest save"
        assert line in cluster.text()
    (path,) = (tmp_path / "agent").rglob("events.jsonl")
    counted = [event for event in read_events(path) if isinstance(event, JobWentBack)]
    assert [(event.from_step, event.to_step) for event in counted] == [
        (event["before"], event["step"]) for event in cluster.events("went_back")
    ]


def test_sigterm_to_the_job_saves_and_a_later_run_goes_on_with_the_same_bits(start, undisturbed, tmp_path):
    cluster = start(2, script_flag="--save")
    cluster.wait_step(12)
    cluster.process.send_signal(signal.SIGTERM)
    cluster.process.wait(150)
    assert cluster.digests() == set(), "it was stopped before its end"
    saved = max(event["step"] for event in cluster.events("saved"))
    assert saved >= 12
    cluster.release()
    again = Cluster(cluster.directory, 3, NUM_STEPS, script_flag="--save")
    try:
        again.finish()
    finally:
        again.close()
    assert cluster.digests() == {undisturbed}
    assert [event["step"] for event in again.events("resumed")] == [saved]


def test_sigterm_to_one_process_saves_and_exits_with_code_0(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from elastic_training import F, make_job
from phalanx.elastic import RunOptions, Saves
job = make_job(run=RunOptions(progress=False), saves=Saves(directory={str(tmp_path)!r}))
for step in job.steps(epochs=3):
    for micro in step:
        micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
    if step.number == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    step.commit()
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner", "step-000000000003"]
