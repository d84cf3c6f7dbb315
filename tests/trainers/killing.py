"""Lets the workers of a test do something to their job at a named place, each once in the whole job."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.comm.faults import lose_result_at, play
from phalanx.data import ShardReader, ShardSource
from phalanx.elastic import Job, Outcome, Step
from phalanx.launch.cli._scale import scale

WRITER = "writer"


@dataclass(frozen=True)
class Deed:
    """What the worker of a rank, or the writer, does at a place in a step: die, leave politely, or ask for a size."""

    rank: int | str
    step: int
    place: str
    action: str = "kill"

    @classmethod
    def parse(cls, text: str) -> Deed:
        rank, step, place, *action = text.split(":")
        return cls(rank if rank == WRITER else int(rank), int(step), place, *action)

    def is_at(self, place: str, job: Job, step: int, *, is_late: bool) -> bool:
        is_mine = job.is_writer if self.rank == WRITER else job.rank == self.rank
        return is_mine and self.place == place and (self.step == step or (is_late and self.step < step))

    def size_after(self, size: int) -> int:
        """How many workers there are when it is done and the dead are replaced."""
        if self.action.startswith("scale="):
            return int(self.action.removeprefix("scale="))
        return size - 1 if self.action == "leave" else size

    def do(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            scale(os.environ["PHALANX_STORE"], os.environ["PHALANX_JOB"], self.size_after(0))


class Shards(ShardSource):
    """A source of shards whose samples are made by their number."""

    def __init__(self, make_sample: Callable[[int], object], num_shards: int, size: int) -> None:
        self.sizes = np.full(num_shards, size)
        self.fingerprints = np.arange(num_shards, dtype=np.uint64)
        self.make_sample = make_sample

    def name_of(self, shard: int) -> str:
        return f"shard-{shard}"

    def open(self, shard: int) -> ShardReader:
        return OneShard(self, shard)


class OneShard(ShardReader):
    def __init__(self, source: Shards, shard: int) -> None:
        self.source, self.first = source, shard * int(source.sizes[0])

    def read(self, offsets: Sequence[int]) -> list[object]:
        return [self.source.make_sample(self.first + offset) for offset in offsets]


class Killings:
    """``rank:step:place`` each, or ``writer:step:place``, with ``:leave`` or ``:scale=N`` for another deed than a kill.

    As long as one of them is to come, and after one that adds workers, the workers wait in each step for those that
    are to come, so that nothing depends on how long one takes to start. One that would leave nobody is done at the same
    place of a later step.
    """

    def __init__(self, directory: Path, given: str, size: int, adopt: str = "") -> None:
        self._directory = directory
        self._wanted = [Deed.parse(one) for one in given.split(",") if one]
        self._size = size
        self._adopt = tuple(int(number) for number in adopt.split(":") if number)

    def _path(self, number: int) -> Path:
        return self._directory / f"done-{number}"

    def _awaited(self) -> int:
        """The number of workers to wait for."""
        done = [deed for number, deed in enumerate(self._wanted) if self._path(number).exists()]
        if len(done) == len(self._wanted) and not any(deed.action.startswith("scale") for deed in done):
            return 0
        size = self._size
        for deed in done:
            size = deed.size_after(size)
        return size

    def wait(self, job: Job) -> None:
        """At the beginning of a step: until the group is whole, or will be at the next boundary.

        A worker that is to take this step over from the others loses the result of the step's last collective.
        """
        if (job.rank, job.step) == self._adopt and not (self._directory / "missed").exists():
            (self._directory / "missed").touch()
            self._playing = play(lose_result_at(job.rank, 0, name="all_gather"))  # kept: it would end when collected
            self._playing.__enter__()
        deadline = time.monotonic() + 120
        while job.world_size < self._awaited():
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
        for number, deed in enumerate(self._wanted):
            late = self._directory / f"late-{number}"
            if deed.is_at(place, job, step, is_late=late.exists()):
                if deed.action in ("kill", "leave") and job.world_size == 1:
                    late.touch()  # on a slow machine the one before is not replaced yet, and nobody would be left
                    continue
                try:
                    os.close(os.open(self._path(number), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                deed.do()


def run_script(
    fit: Callable[[argparse.Namespace, Path], None],
    plain: Callable[[int], str],
    refusals: Callable[[Path], dict[str, str]],
    checks: Callable[[Path], dict[str, object]],
) -> None:
    """What the trainers' scripts do with their command lines, which are the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kill", default="")
    parser.add_argument("--size", type=int, default=1, help="workers to wait for while a deed is to come")
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
        (directory / "checks.json").write_text(json.dumps(checks(directory)))
    fit(arguments, directory)
