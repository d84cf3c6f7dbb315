"""Runs the documented loop of accelerate, ``examples/accelerate_loop.py``, as it is, and kills workers in it.

accelerate_elastic_script.py DIRECTORY [rank:step:place,... SIZE]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from killing import Killings

from phalanx.elastic import Job

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
directory, kill, size = (*sys.argv[1:], "", "1")[:3]
killings = Killings(Path(directory), kill, int(size))
steps = Job.steps


def steps_with_kills(job, **options):
    for step in steps(job, **options):
        killings.wait(job)
        killings.at("batch", job, job.step)
        yield step


if __name__ == "__main__":
    Job.steps = steps_with_kills
    sys.argv = [str(EXAMPLE), "--epochs=1", "--samples=2048"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
