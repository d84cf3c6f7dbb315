"""Workers die after the last step, in real processes: what the script does after its loop is done all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from elastic_training import make_job, train

from phalanx.elastic import RunOptions

pytestmark = pytest.mark.timeout(300)

AFTER = Path(__file__).parent / "after_script.py"
NUM_STEPS = 6


@pytest.fixture(scope="module")
def alone() -> str:
    job = make_job(run=RunOptions(progress=False, threads=1))
    train(job, max_steps=NUM_STEPS)
    return f"{NUM_STEPS} {job.digest()}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started = []

    def begin(num_workers, plan="", **options):
        directory = tmp_path / f"job{len(started)}"
        started.append(Cluster(directory, num_workers, NUM_STEPS, script=AFTER, script_flag=plan, **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def wait_for(cluster: Cluster, *names: str) -> None:
    cluster.wait_until(lambda: all((cluster.directory / name).exists() for name in names), ", ".join(names))


def holder(cluster: Cluster, rank: int) -> str:
    """The worker that runs what follows the loop as ``rank``."""
    return (cluster.directory / f"after-{rank}").read_text()


def touch(cluster: Cluster, *names: str) -> None:
    for name in names:
        (cluster.directory / name).touch()


def test_a_worker_killed_before_it_writes_the_result_is_replaced_by_one_that_writes_it(start, alone):
    """Rank 0 dies while it writes, twice; the others have ended their scripts, one of them without exit functions."""
    cluster = start(3, "changes quick")
    wait_for(cluster, "after-0", "after-1", "after-2")
    others = [holder(cluster, 1), holder(cluster, 2)]
    touch(cluster, "go-1", "go-2")
    wait_for(cluster, "end-1", "end-2")
    for _ in range(2):
        victim = holder(cluster, 0)
        cluster.signal(victim)
        cluster.wait_until(lambda victim=victim: holder(cluster, 0) != victim, "another rank 0")
    touch(cluster, "go")
    cluster.finish()
    assert (cluster.directory / "result").read_text() == alone
    assert [holder(cluster, 1), holder(cluster, 2)] == others, "the ranks of the others have moved"
    assert [event["rank"] for event in cluster.events("took_over")] == [0, 0]


def test_a_kill_inside_an_evaluation_an_error_and_an_exit_after_the_loop(start, alone):
    """Every rank is lost once, each in its own way; the replacements get the results of evaluations they missed."""
    cluster = start(3, "evaluate")
    touch(cluster, "hold-evaluation", "raise-0", "exit-2")
    wait_for(cluster, "after-0", "after-1", "after-2")
    first = [holder(cluster, rank) for rank in range(3)]
    wait_for(cluster, *(f"scoring-{worker}" for worker in first))
    cluster.signal(first[1])
    cluster.wait_until(lambda: holder(cluster, 1) != first[1], "another rank 1")
    touch(cluster, "go-evaluation")
    cluster.wait_until(lambda: all(holder(cluster, rank) != first[rank] for rank in range(3)), "three replacements")
    touch(cluster, "go")
    cluster.finish(tracebacks=["RuntimeError: told to fail after the loop"])
    assert (cluster.directory / "result").read_text() == alone
    assert sorted(event["rank"] for event in cluster.events("took_over")) == [0, 1, 2]
    results = [path.read_text() for path in cluster.directory.glob("evaluated-*")]
    assert len(results) == 5, "all but the one that was killed inside of it"
    assert len(set(results)) == 1


def test_all_workers_killed_after_the_loop_is_a_failure_that_says_so(start):
    cluster = start(2, max_restarts="5")
    wait_for(cluster, "after-0", "after-1")
    for rank in (0, 1):
        cluster.signal(holder(cluster, rank))
    assert cluster.process.wait(150) == 1, cluster.text()
    assert "StepsLost: all workers were lost after 6 committed steps, and the job has no saves" in cluster.text()
    assert not (cluster.directory / "result").exists()


def test_a_script_with_two_jobs_is_joined_by_a_replacement_between_them(start, alone):
    cluster = start(2, "twice")
    wait_for(cluster, "after-0", "after-1")
    victim = holder(cluster, 0)
    cluster.signal(victim)
    cluster.wait_until(lambda: holder(cluster, 0) != victim, "another rank 0")
    touch(cluster, "go")
    cluster.finish()
    second = make_job("sgd", run=RunOptions(progress=False, threads=1))
    train(second, max_steps=NUM_STEPS)
    assert (cluster.directory / "result").read_text() == alone
    for rank in (0, 1):
        assert (cluster.directory / f"second-{rank}").read_text() == f"{NUM_STEPS} {second.digest()}"
