"""The trackers' own packages, where they are installed: one run, each step once, though the first worker is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

from phalanx.elastic._tracking import Tracker, Tracking
from phalanx.integrations._wandb_files import read_records
from phalanx.integrations.trackers import MLflow, Trackio

SCRIPT = Path(__file__).parent / "tracked_script.py"
NUM_STEPS = 16
HELD = 8


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"no {package}: pip install {package}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A job that the installed trackers log; its first worker was killed before step 8."""
    trackers = [name for name in ("tensorboard", "wandb") if find_spec(name) is not None]
    directory = tmp_path_factory.mktemp("tracked") / "job"
    cluster = Cluster(directory, 2, NUM_STEPS, 0.0, hold=HELD, script=SCRIPT, script_flag=" ".join(trackers))
    try:
        cluster.wait_workers(2)
        cluster.wait_step(HELD)
        first = cluster.newest_round()[0]
        cluster.signal(first)
        cluster.wait_until(lambda: first not in cluster.newest_round(), "a round without the first")
        cluster.wait_workers(2)
        cluster.release()
        cluster.finish()
        assert "it is left out" not in cluster.text(), "of the trackers none"
    finally:
        cluster.close()
    return cluster


def told_steps(cluster: Cluster) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in cluster.events("step")}


@pytest.mark.timeout(280)
@needs("tensorboard")
def test_tensorboard_shows_each_step_once_though_the_first_worker_was_killed(job: Cluster) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [run] = (job.directory / "tensorboard").iterdir()
    assert len(list(run.iterdir())) >= 2, "a file of each worker that was the first"
    read = EventAccumulator(str(run), purge_orphaned_data=True)
    read.Reload()
    points = read.Scalars("loss")
    assert [point.step for point in points] == list(range(NUM_STEPS))
    losses = told_steps(job)
    assert [point.value for point in points] == [pytest.approx(losses[point.step]) for point in points]
    assert set(read.Tags()["scalars"]) == {"loss", "epoch", "workers"}


def history(directory: Path) -> list[dict[str, Any]]:
    """What the files of offline runs hold, in the order of their names."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in read_records(path.read_bytes()):
            record = records.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append({**values, "run": path.stem.removeprefix("run-")})
    return found


@pytest.mark.timeout(280)
@needs("wandb")
def test_wandb_has_each_step_once_though_the_first_worker_was_killed(job: Cluster) -> None:
    """W&B holds the last step back until the next one, so the one that died took at least step 7 with it."""
    rows = history(job.directory)
    assert len({row["run"] for row in rows}) == 1, "one id: `wandb sync` makes one run of its files"
    assert len(list(job.directory.glob("wandb/offline-run-*"))) >= 2, "a file of each worker that was the first"
    assert [row["_step"] for row in rows] == list(range(NUM_STEPS)), "in the order of the files: none lost, none twice"
    losses = told_steps(job)
    assert all(row["loss"] == pytest.approx(losses[row["_step"]]) for row in rows)


KILLED = """
import os, signal
from phalanx.elastic._tracking import Tracker, Tracking
from phalanx.integrations.trackers import MLflow, Trackio
tracking = Tracking([{tracker}], "job7")
for step in range(4):
    tracking.tell(step, {{"loss": 1.0 / (step + 1), "epoch": 0.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def go_on_after_a_kill(tracker: Tracker, same: str) -> None:
    """Steps 0 to 3 by a process that is killed at once, then 4 and 5 by one that has seen them all."""
    killed = subprocess.run([sys.executable, "-c", KILLED.format(tracker=same)], timeout=200, check=False)
    assert killed.returncode == -signal.SIGKILL
    tracking = Tracking([tracker], "job7")
    for step in range(4):
        tracking.keep(step, {"loss": 1.0 / (step + 1), "epoch": 0.0})
    for step in (4, 5):
        tracking.tell(step, {"loss": 1.0 / (step + 1), "epoch": 0.0})
    assert not tracking._failed
    tracking.close()


@pytest.mark.timeout(280)
@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what it uses of others
def test_mlflow_has_each_step_once_though_its_writer_was_killed(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    go_on_after_a_kill(MLflow("tests", uri=uri), f"MLflow('tests', uri={uri!r})")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    for name in ("loss", "epoch"):
        points = client.get_metric_history(run.info.run_id, name)
        assert sorted(point.step for point in points) == list(range(6))
    assert all(point.value == 1.0 / (point.step + 1) for point in client.get_metric_history(run.info.run_id, "loss"))
    assert run.info.status == "FINISHED"


@pytest.mark.timeout(280)
@needs("trackio")
def test_trackio_has_each_step_once_though_its_writer_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    go_on_after_a_kill(Trackio("tests"), "Trackio('tests')")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tests", "job7")
    assert [(row["step"], row["loss"]) for row in rows] == [(step, 1.0 / (step + 1)) for step in range(6)]
