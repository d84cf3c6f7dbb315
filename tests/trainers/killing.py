"""Lets a worker of a test kill itself at a named place, once in the whole job."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.comm.faults import lose_result_at, play
from phalanx.elastic import Job, Outcome, Step


class Killings:
    """``rank:step:place`` each: the worker of that rank dies when it comes there.

    As long as one of them is to come, the workers wait in each step for the replacement of the one before, so that
    nothing depends on how long it takes to start.
    """

    def __init__(self, directory: Path, given: str, size: int, adopt: str = "") -> None:
        self._directory = directory
        self._wanted = [one.split(":") for one in given.split(",") if one]
        self._size = size
        self._adopt = tuple(int(number) for number in adopt.split(":") if number)

    def _path(self, number: int) -> Path:
        return self._directory / f"killed-{number}"

    def wait(self, job: Job) -> None:
        """At the beginning of a step: until the group is whole, or will be at the next boundary.

        A worker that is to take this step over from the others loses the result of the step's last collective.
        """
        if (job.rank, job.step) == self._adopt and not (self._directory / "missed").exists():
            (self._directory / "missed").touch()
            self._playing = play(lose_result_at(job.rank, 0, name="all_gather"))  # kept: it would end when collected
            self._playing.__enter__()
        deadline = time.monotonic() + 120
        while job.world_size < self._size and not all(self._path(n).exists() for n in range(len(self._wanted))):
            regrouping = job.regrouping
            if regrouping.coordinator.signals.wish or regrouping.is_broken:
                return
            assert time.monotonic() < deadline, "no replacement came"
            time.sleep(0.005)

    def note(self, step: Step | None) -> None:
        """Leave a mark when a step was taken over from another worker."""
        if step is not None and step.outcome is Outcome.ADOPTED:
            (self._directory / "adopted").touch()

    def at(self, place: str, job: Job, step: int) -> None:
        for number, (wanted_rank, wanted_step, wanted_place) in enumerate(self._wanted):
            if (int(wanted_rank), int(wanted_step), wanted_place) == (job.rank, step, place):
                try:
                    os.close(os.open(self._path(number), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)


def run_script(
    fit: Callable[[argparse.Namespace, Path], None],
    plain: Callable[[int], str],
    refusals: Callable[[Path], dict[str, str]],
) -> None:
    """What the trainers' scripts do with their command lines, which are the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kill", default="")
    parser.add_argument("--size", type=int, default=1, help="workers to wait for while a kill is to come")
    parser.add_argument("--adopt", default="", help="rank:step: that worker misses the end of the step")
    parser.add_argument("--features", default="")
    parser.add_argument("--resume", default="")
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.plain:
        (directory / "plain").write_text(plain(arguments.epochs))
        (directory / "refused.json").write_text(json.dumps(refusals(directory)))
    fit(arguments, directory)
