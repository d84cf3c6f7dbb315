"""Saves of sharded jobs are read at any number of workers and copies, and unsharded; so are digests."""

from __future__ import annotations

from typing import Any

import pytest
from sharded_training import make_job, train, weights

from phalanx.comm import simulate
from phalanx.elastic import RunOptions, Saves

QUIET = RunOptions(progress=False, threads=1)


def part(group, directory, max_steps, sharded, copies, kind="adamw"):
    saves = Saves(directory=directory, every=2)
    run = RunOptions(progress=False, group=group, verify=True, threads=1)
    job = make_job(kind, sharded=sharded, copies=copies, saves=saves, run=run)
    told = train(job, max_steps=max_steps)
    job.saving.wait_idle()
    return told, job.step, job.digest(), weights(job)


@pytest.fixture(scope="module", params=["adamw", pytest.param("adafactor", marks=pytest.mark.soak)])
def undisturbed(request: pytest.FixtureRequest) -> tuple[str, list[Any], str, str]:
    job = make_job(request.param, sharded=False, run=QUIET)
    told = train(job, max_steps=7)
    return request.param, told, job.digest(), weights(job)


WAYS = [((2, True, 2), (3, True, 1)), ((3, True, 1), (1, False, None)), ((1, False, None), (4, True, 3))]


@pytest.mark.parametrize("way", WAYS, ids=["sharded to sharded", "sharded to unsharded", "unsharded to sharded"])
def test_a_save_resumes_at_any_number_of_workers_sharded_or_not(tmp_path, undisturbed, way):
    kind, told, digest, sha = undisturbed
    (size, *before), (later, *after) = way
    simulate(size).run(part, tmp_path, 4, *before, kind)
    found = [path.name for path in sorted(tmp_path.iterdir())]
    assert found == ["last-good", "step-000000000002", "step-000000000004"]
    for found in simulate(later).run(part, tmp_path, 7, *after, kind):
        assert found == (told[4:], 7, digest, sha)
