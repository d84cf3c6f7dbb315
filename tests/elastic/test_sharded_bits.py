"""A sharded job has the bits of the same job unsharded, on any number of workers and with any number of copies."""

from __future__ import annotations

import pytest
from sharded_training import make_job, train, weights

from phalanx.comm import simulate

EVERYTHING = [(size, copies) for size in (1, 2, 3, 4, 5, 7, 8) for copies in (1, 2, 3)]
SOME = [(3, 2), (5, 1), (1, 2), (9, 3), (3, "all")]


def unsharded(options):
    job = make_job(sharded=False, **{k: v for k, v in options.items() if k not in ("clip", "autocast")})
    told = train(job, **{k: v for k, v in options.items() if k in ("clip", "autocast")})
    return told, weights(job)


def run(group, copies, options):
    rest = {k: v for k, v in options.items() if k not in ("clip", "autocast")}
    job = make_job(group=group, copies=copies, **rest)
    told = train(job, **{k: v for k, v in options.items() if k in ("clip", "autocast")})
    return told, weights(job)


OPTIONS = {
    "adamw, clipped": {},
    "sgd": {"kind": "sgd", "clip": None},
    "muon, whole matrices": {"kind": "muon"},
    "bfloat16 compute, parts": {"autocast": True, "parts": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_number_of_workers_and_copies_gives_the_bits_of_the_unsharded_job(options):
    expected = unsharded(options)
    for size, copies in SOME[:2] if options else SOME:
        for found in simulate(size).run(run, copies, options):
            assert found == expected, f"{size} workers, {copies} copies"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.timeout(3000)
def test_all_numbers_of_workers_and_copies_give_the_bits_of_the_unsharded_job(kind, clip, autocast):
    options = {"kind": kind, "clip": clip, "autocast": autocast}
    expected = unsharded(options)
    for size, copies in EVERYTHING:
        for found in simulate(size, timeout=1000).run(run, copies, options):
            assert found == expected, f"{size} workers, {copies} copies"
