"""Who of the workers writes: Lightning's ``rank_zero_only`` follows the job's writer, and its loggers go on.

Before the workers have met, nobody writes but the very first rank of the job: a replacement may have its rank while
another worker is at the file. Loggers get one version for the whole job. Every worker remembers what was logged last:
when it comes to be the writer, it logs again what the one before may have died with, and takes over the file of a
``CSVLogger``, which would otherwise be deleted. So a step may be logged twice, never not at all; in a CSV file, once.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger

from phalanx.elastic import write_once
from phalanx.world import World

REMEMBERED = 16
"""How many calls of a logger a worker remembers: more than a step and the validation after it make."""


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the first worker of all, by its birth."""
    world = World.from_env(environ)
    return world.rank == 0 and world.generation == 0


def set_writer(is_writer: bool) -> None:
    """Have what Lightning does on rank 0 only done here, or not."""
    rank_zero_only.rank = 0 if is_writer else 1


def agree_on_versions(loggers: list[Any]) -> None:
    """Give each logger that counts versions by the directories it finds the one that the first worker found."""
    for number, logger in enumerate(loggers):
        if getattr(logger, "_version", "") is not None:
            continue
        version = write_once(f"lightning-logger-{number}", str(logger.version))
        logger._version = int(version) if version.isdigit() else version
        if isinstance(logger, CSVLogger):
            logger._flush_logs_every_n_steps = 1  # what is in memory is lost with the writer


class LogTail:
    """What a logger was told last on a worker that does not write."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._log = logger.log_metrics
        self._rows: deque[tuple[dict[str, float], int | None]] = deque(maxlen=REMEMBERED)
        logger.log_metrics = self

    def __call__(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if rank_zero_only.rank == 0:
            self._log(metrics, step)
        else:
            self._rows.append(
                ({name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}, step)
            )

    def take_over(self) -> None:
        """Go on with the file of the writer before: log what it may not have logged."""
        known = _take_over_csv(self.logger) if isinstance(self.logger, CSVLogger) else set()
        for metrics, step in self._rows:
            if (step, frozenset(metrics)) not in known:
                self._log(metrics, step)
        self._rows.clear()


def _take_over_csv(logger: CSVLogger) -> set[tuple[int | None, frozenset[str]]]:
    """Have the logger go on with its file; return which values of which steps are in it."""
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return set()
    aside = path.with_suffix(".taken-over")
    path.rename(aside)  # it would be deleted when the experiment is made
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        experiment = logger.experiment
    with aside.open(newline="") as file:
        reader = csv.DictReader(file)
        experiment.metrics_keys = list(reader.fieldnames or ())
        rows = [{name: value for name, value in row.items() if value} for row in reader]
    aside.rename(path)
    return {(int(row.pop("step")), frozenset(row)) for row in rows if "step" in row}
