"""Lightning's Trainer on an elastic job: every worker ends with what one undisturbed process has."""

from __future__ import annotations

import json

import pytest
from trainer_runs import assert_equal_everywhere

pytestmark = pytest.mark.timeout(600)

SCRIPT = "lightning_script.py"
FEATURES = "--features=checkpoint,bar"
DISTURBED = [
    "--kill=1:1:batch_start:scale=3,0:3:reduced,1:9:validation,writer:15:batch_end,1:16:batch_start:leave",
    "--adopt=1:6",
]
STORIES = {
    "scale and leaves": "--kill=0:2:batch_start:scale=3,0:5:reduced:leave,0:9:validation:leave,0:12:batch_end",
    "leaves at ends": "--kill=0:8:batch_end:leave,0:9:epoch_end:scale=3,0:17:batch_start:leave",
    "adoption": "--adopt=1:8",
    "adoption of the last": "--adopt=0:17",
}


def test_kills_adoption_joins_and_leaves_leave_every_worker_as_one_process(runs):
    """A worker is added; rank 0 dies between sum and commit, another in validation, the writer before it has logged its
    step and written its checkpoint; one worker takes a step over from the others; one leaves. Also: one process is what
    a plain loop over the job's steps is."""
    alone = runs(SCRIPT, FEATURES, "--plain")
    (expected,) = alone.results().values()
    assert (alone.directory / "plain").read_text() == expected["digest"]
    run = runs(SCRIPT, FEATURES, *DISTURBED, workers=2)
    assert_equal_everywhere(run, alone)
    assert len(run.results()) >= 2
    assert (run.directory / "adopted").exists()
    assert run.rows() == alone.rows(), "the CSV file has every step once, whoever wrote it"
    assert run.console.count("phalanx: in place are healed training steps and what callbacks keep") == 1
    assert run.undone(DISTURBED[0]) == []
    assert run.checkpoints() == alone.checkpoints() != {}


@pytest.mark.soak
@pytest.mark.parametrize("kill", ["writer:5:batch_end", "writer:18:batch_end", "writer:9:validated,writer:18:validated",
                                  "writer:10:batch_end,writer:15:batch_end", "writer:18:train_end"])  # fmt: skip
def test_what_a_lost_writer_did_not_save_is_saved_by_the_next(runs, kill):
    flags = [f"--features={FEATURES.partition('=')[2]},best,ema"]
    alone = runs(SCRIPT, *flags)
    run = runs(SCRIPT, *flags, f"--kill={kill}", workers=2)
    assert run.undone(kill) == []
    assert_equal_everywhere(run, alone)
    assert run.checkpoints() == alone.checkpoints()
    assert {name.partition("=")[0] for name in run.checkpoints()} == {"epoch", "last.ckpt", "last-v1.ckpt"}


@pytest.mark.soak
@pytest.mark.parametrize("kill", ["0:4:batch_start", "0:9:epoch_end", "0:9:validation", "0:17:reduced",
                                  "0:18:train_end", "0:3:reduced,0:6:batch_end,0:9:validation"])  # fmt: skip
@pytest.mark.parametrize("features", ["checkpoint,ema,tb", "plateau,early,fp16", "shared"])
def test_the_first_worker_dies_anywhere(runs, features, kill):
    flags = [f"--features={features}", "--epochs=2"]
    alone = runs(SCRIPT, *flags)
    run = runs(SCRIPT, *flags, f"--kill={kill}", workers=2)
    assert run.undone(kill, alone.num_steps()) == []
    assert_equal_everywhere(run, alone)
    assert run.rows() == alone.rows()
    assert run.scalars() == alone.scalars()
    assert bool(alone.scalars()) == ("tb" in features)


def test_shards_are_shuffled_a_few_at_a_time(runs):
    found = json.loads((runs(SCRIPT, FEATURES, "--plain").directory / "checks.json").read_text())
    assert found["order"].startswith("shards")


@pytest.mark.soak
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("features", ["checkpoint,ema,tb,bar", "plateau,early,fp16", "shared"])
def test_the_number_of_workers_changes_anywhere(runs, features, story):
    flags = [f"--features={features}", "--epochs=2"]
    alone = runs(SCRIPT, *flags)
    run = runs(SCRIPT, *flags, STORIES[story], workers=2)
    assert_equal_everywhere(run, alone)
    assert run.rows() == alone.rows()
    if story.startswith("adoption"):
        is_reached = alone.num_steps() > int(STORIES[story].rpartition(":")[2])  # not stopped before
        assert (run.directory / "adopted").exists() == is_reached
    else:
        assert run.undone(STORIES[story], alone.num_steps()) == []


def test_what_a_job_cannot_do_is_refused_with_the_alternative(runs):
    refused = json.loads((runs(SCRIPT, FEATURES, "--plain").directory / "refused.json").read_text())
    for name, part in {
        "accumulate": "use ElasticStrategy(num_slots=...)",
        "limit": "limit_train_batches=3: use max_steps",
        "overfit": "a Subset of the dataset",
        "reload": "the job keeps one dataset",
        "time": "use max_steps or max_epochs",
        "manual": "write the loop with phalanx.elastic.Job",
        "several": "one optimizer with several parameter groups, or write the loop with phalanx.elastic.Job",
        "lbfgs": "does not take LBFGS",
        "sampler": "WeightedRandomSampler; expected shuffle=True",
        "iterable": "use phalanx.data.ShardedDataset",
        "interval": "use a number of steps",
        "backward": "change them in on_before_optimizer_step",
        "transfer": "do it in the loader's collate_fn",
        "closure": "Pass on the one that Lightning gave",
        "second fit": "call fit once per process",
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


@pytest.mark.soak
@pytest.mark.parametrize("evaluate", ["everywhere", "shared"])
def test_what_follows_a_fit_is_the_same_on_every_worker(runs, evaluate):
    """Validation, tests with the last and the best weights, and predictions; from a data module with a hook."""
    script = "lightning_after_fit_script.py"
    alone, run = runs(script, evaluate), runs(script, evaluate, workers=2)
    assert_equal_everywhere(run, alone)
    (found,) = alone.results().values()
    assert len(run.results()) == 2
    assert found["fit"]["number"] == 3.0
    assert found["fit"]["half"] == pytest.approx(found["fit"]["loss_epoch"] / 2)
    assert len(found["predict"]) == 64
