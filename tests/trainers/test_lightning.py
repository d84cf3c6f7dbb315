"""Lightning's Trainer on an elastic job: every worker ends with what one undisturbed process has."""

from __future__ import annotations

import json

import pytest
from trainer_runs import assert_equal_everywhere

pytestmark = pytest.mark.timeout(600)

SCRIPT = "lightning_script.py"
FEATURES = "--features=checkpoint,bar"
DISTURBED = ["--kill=0:3:reduced,1:9:validation,0:14:batch_end", "--adopt=1:6"]


def test_kills_adoption_and_joins_leave_every_worker_as_one_process(runs):
    """Rank 0 dies between sum and commit, another in validation, the writer before it has logged its step; one worker
    takes a step over from the others. Also: one process is what a plain loop over the job's steps is."""
    alone = runs(SCRIPT, FEATURES, "--plain")
    (expected,) = alone.results().values()
    assert (alone.directory / "plain").read_text() == expected["digest"]
    run = runs(SCRIPT, FEATURES, *DISTURBED, workers=3)
    assert_equal_everywhere(run, alone)
    assert len(run.results()) >= 2
    assert (run.directory / "adopted").exists()
    assert run.rows() == alone.rows(), "the CSV file has every step once, whoever wrote it"
    assert sorted(p.name for p in (run.directory / "checkpoints").iterdir()) == sorted(
        p.name for p in (alone.directory / "checkpoints").iterdir()
    )


@pytest.mark.soak
@pytest.mark.parametrize("kill", ["0:4:batch_start", "0:9:epoch_end", "0:9:validation", "0:17:reduced",
                                  "0:18:train_end", "0:3:reduced,0:7:batch_end,0:9:validation"])  # fmt: skip
@pytest.mark.parametrize("features", ["checkpoint,ema,tb", "plateau,early,fp16", "shared"])
def test_the_first_worker_dies_anywhere(runs, features, kill):
    flags = [f"--features={features}", "--epochs=2"]
    alone = runs(SCRIPT, *flags)
    run = runs(SCRIPT, *flags, f"--kill={kill}", workers=2)
    assert_equal_everywhere(run, alone)
    assert run.rows() == alone.rows()


def test_what_a_job_cannot_do_is_refused_with_the_alternative(runs):
    refused = json.loads((runs(SCRIPT, FEATURES, "--plain").directory / "refused.json").read_text())
    for name, part in {
        "accumulate": "use ElasticStrategy(num_slots=...)",
        "limit": "limit_train_batches=3: use max_steps",
        "overfit": "a Subset of the dataset",
        "reload": "the job keeps one dataset",
        "time": "use max_steps or max_epochs",
        "manual": "write the loop with phalanx.elastic.Job",
        "several": "multiple optimizers is only supported with manual optimization",
        "lbfgs": "does not take LBFGS",
        "sampler": "WeightedRandomSampler; expected shuffle=True",
    }.items():
        assert part in refused[name], name


@pytest.mark.soak
def test_a_run_goes_on_from_lightnings_own_checkpoint(runs):
    alone = runs(SCRIPT, FEATURES, "--plain")
    path = next((alone.directory / "checkpoints").glob("*step=5.ckpt"), None) or next(
        (alone.directory / "checkpoints").glob("*.ckpt")
    )
    run = runs(SCRIPT, "--features=bar", f"--resume={path}", "--kill=0:14:reduced", workers=2)
    (expected,) = alone.results().values()
    for found in run.results().values():
        assert (found["digest"], found["lr"], found["step"]) == (expected["digest"], expected["lr"], expected["step"])
        assert found["seen"] == expected["seen"]
