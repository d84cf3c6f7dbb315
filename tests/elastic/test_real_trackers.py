"""The trackers' own packages, where they are installed: one run, each step once, though the first worker is killed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

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


@needs("mlflow")
def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for steps in (range(4), range(2, 6)):  # the second began before the last step of the first
        tracker = MLflow("tests", uri=uri)
        first = tracker.begin("job7", steps[0])
        for step in steps:
            if step >= first:
                tracker.log(step, {"loss": 1.0 / (step + 1)})
        tracker.close()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(step, 1.0 / (step + 1)) for step in range(6)]
    assert run.info.status == "FINISHED"


@needs("trackio")
def test_trackio_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    for steps in (range(3), range(3, 5)):
        tracker = Trackio("tests")
        first = tracker.begin("job7", steps[0])
        assert first == steps[0]
        for step in steps:
            tracker.log(step, {"loss": 1.0 / (step + 1)})
        tracker.close()
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tests", "job7")
    assert [row["_step"] for row in rows] == list(range(5))
