"""Trains the job of ``elastic_training`` with saves in a bucket: ``python uploading_script.py URL LOCAL NUM_STEPS``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "elastic"))

from elastic_training import make_job, train  # of the tests of jobs

from phalanx.elastic import RunOptions, Saves


def main() -> None:
    url, local, num_steps = sys.argv[1:]
    saves = Saves(directory=url, local=local, every=2)
    job = make_job(saves=saves, run=RunOptions(progress=False, threads=1))
    train(job, max_steps=int(num_steps), wait_for_saves=True)


if __name__ == "__main__":
    main()
