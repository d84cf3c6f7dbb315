"""Logs elastic jobs to TensorBoard, Weights & Biases, MLflow and trackio: ``Job(trackers=[TensorBoard("runs")])``.

Each adapter loads its package at its first step, on the one worker that logs, and goes on with the same run after a
regroup or a restart; ``name`` gives that run a name of your own (default: the job's). An absent package is said then,
and training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.integrations._wandb_files import last_step

__all__ = ["MLflow", "TensorBoard", "Trackio", "WandB"]


def _load(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise RuntimeError(f"the package {package} is not installed ({error}): pip install {package}") from error


class TensorBoard:
    """Writes event files to ``directory/NAME``; what a lost worker wrote beyond the last step is purged.

    >>> TensorBoard("runs").directory
    'runs'
    """

    def __init__(self, directory: str | os.PathLike[str], *, name: str = "") -> None:
        self.directory = os.fspath(directory)
        self.name = name
        self._writer: Any = None

    def begin(self, run: str, step: int) -> int:
        made = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = made(os.path.join(self.directory, self.name or run), purge_step=step)
        return step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a worker that is killed says no more, and its successor does not know what it told

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Logs to one run of Weights & Biases, whose id is the job's name; ``settings`` go to ``wandb.init``.

    W&B passes steps on later than it is told them. What it had not when the worker that told it was killed, the next
    one tells again: the run on the server says how far it is, and so do the files of an offline run, if they lie here.
    """

    FLUSH = "x_transaction_log_flush_interval"
    FLUSH_EVERY = 1.0
    """Seconds between two writes to the file of an offline run; W&B's own default is 15."""

    def __init__(self, project: str, *, name: str = "", **settings: Any) -> None:
        self.project = project
        self.name = name
        self._settings = settings
        self._run: Any = None

    def begin(self, run: str, step: int) -> int:
        wandb = _load("wandb", "wandb")
        name = self.name or run
        given = {"project": self.project, "id": name, "resume": "allow", **self._settings}
        if "settings" not in given and self.FLUSH in getattr(wandb.Settings, "model_fields", ()):
            given["settings"] = wandb.Settings(**{self.FLUSH: self.FLUSH_EVERY})
        self._run = wandb.init(**given)
        if getattr(self._run, "offline", False):
            return self._lacking_in_files(name, step)
        # The first that the server lacks; its steps can only grow.
        return int(getattr(self._run, "step", 0) or 0) or step

    def _lacking_in_files(self, name: str, step: int) -> int:
        """Return the step after the last one in the files of those that were first before; else the next one."""
        mine = Path(self._run.dir).parent
        files = [path for path in mine.parent.glob(f"*/run-{name}.wandb") if path.parent.resolve() != mine.resolve()]
        return last_step(files) + 1 if files else step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow:
    """Logs to one run of MLflow, found again by a tag with the job's name; ``uri`` is its tracking server's."""

    TAG = "phalanx.run"

    def __init__(self, experiment: str, *, name: str = "", uri: str | None = None) -> None:
        self.experiment = experiment
        self.name = name
        self.uri = uri
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def begin(self, run: str, step: int) -> int:
        name = self.name or run
        mlflow = _load("mlflow", "mlflow")
        self._client = mlflow.MlflowClient(self.uri)
        self._metric = mlflow.entities.Metric
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
        quoted = name.replace("'", "\\'")
        runs = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{quoted}'")
        if not runs:
            made = self._client.create_run(experiment, run_name=name, tags={self.TAG: name})
            self._run_id = made.info.run_id
            return step
        self._run_id = runs[0].info.run_id
        history = self._client.get_metric_history(self._run_id, "loss")
        return max([step, *(int(point.step) + 1 for point in history)])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1e3 * time.time())
        # One request: a worker that is killed has told all of a step or nothing of it.
        self._client.log_batch(self._run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)
            self._client = None


class Trackio:
    """Logs to one run of trackio, by the job's name; ``settings`` go to ``trackio.init``.

    Trackio writes twice a second; what it had not written when a worker was killed, the next one tells again.
    """

    def __init__(self, project: str, *, name: str = "", **settings: Any) -> None:
        self.project = project
        self.name = name
        self._settings = settings
        self._package: Any = None

    def begin(self, run: str, step: int) -> int:
        self._package = _load("trackio", "trackio")
        given = {"project": self.project, "name": self.name or run, "resume": "allow", **self._settings}
        begun = self._package.init(**given)
        return int(getattr(begun, "_next_step", step))  # after the last one that is written; it has no other name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        if self._package is not None:
            self._package.finish()
            self._package = None
