"""Hugging Face's Trainer on an elastic job: every worker ends with what one undisturbed process has."""

from __future__ import annotations

import importlib.util
import json

import pytest
from trainer_runs import assert_equal_everywhere

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs Python 3.11"),
]

SCRIPT = "hf_script.py"
ALONE = ["--features=checkpoint", "--plain"]
DISTURBED = [
    "--kill=1:1:batch_start:scale=3,0:3:reduced,1:9:validation,0:14:batch_end,1:16:batch_start:leave,writer:18:saving",
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
    step; one worker takes a step over from the others; one leaves; the writer dies in the last save."""
    alone = runs(SCRIPT, *ALONE)
    (expected,) = alone.results().values()
    assert (alone.directory / "plain").read_text() == expected["digest"]
    run = runs(SCRIPT, "--features=checkpoint,bar", *DISTURBED, workers=2)
    assert_equal_everywhere(run, alone)
    assert run.undone(DISTURBED[0]) == []
    assert_saved_alike(run, alone)
    assert (run.directory / "adopted").exists()
    assert run.console.count("phalanx: in place are healed training steps, TrainerState and callbacks") == 1


def test_steps_that_overflow_are_left_out_as_in_a_plain_loop(runs):
    """With clipping; the schedule of the learning rate leaves them out too."""
    found = json.loads((runs(SCRIPT, *ALONE).directory / "checks.json").read_text())
    assert len(found["overflow"]["skipped"]) >= 2
    assert found["overflow"] == found["plain overflow"]
    assert found["overflow"]["lr"] > 0, "the schedule would have come to its end"


def test_shards_are_shuffled_a_few_at_a_time(runs):
    found = json.loads((runs(SCRIPT, *ALONE).directory / "checks.json").read_text())
    assert found["order"].startswith("shards")


@pytest.mark.soak
@pytest.mark.parametrize("flags", [["--adopt=1:0"], ["--kill=0:1:reduced,0:9:validation"]], ids=["adopted", "killed"])
def test_steps_that_overflow_leave_every_worker_as_one_process(runs, flags):
    alone = runs(SCRIPT, "--features=fp16")
    run = runs(SCRIPT, "--features=fp16", *flags, workers=2)
    assert_equal_everywhere(run, alone)
    assert (run.directory / "adopted").exists() == flags[0].startswith("--adopt")
    if flags[0].startswith("--kill"):
        assert run.undone(flags[0]) == []


@pytest.mark.soak
@pytest.mark.parametrize("kill", ["0:4:batch_start", "0:9:epoch_end", "0:9:validation", "0:17:reduced",
                                  "0:3:reduced,0:6:batch_end,0:9:validation,0:12:reduced"])  # fmt: skip
@pytest.mark.parametrize("features", ["checkpoint,tb", "plateau,early", "shared"])
def test_the_first_worker_dies_anywhere(runs, features, kill):
    alone = runs(SCRIPT, f"--features={features}")
    run = runs(SCRIPT, f"--features={features}", f"--kill={kill}", workers=2)
    assert run.undone(kill, alone.num_steps()) == []
    assert_equal_everywhere(run, alone)
    assert run.scalars() == alone.scalars()
    assert bool(alone.scalars()) == ("tb" in features)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("features", "kill"),
    [
        ("early", "writer:9:saving"),
        ("checkpoint", "writer:5:batch_end,writer:10:saving"),
        ("checkpoint", "writer:18:batch_end"),
    ],
)
def test_what_a_lost_writer_did_not_save_is_saved_by_the_next(runs, features, kill):
    """It is lost before it begins, or with the weights written alone; in mid-run, and after the last step."""
    alone = runs(SCRIPT, f"--features={features}")
    run = runs(SCRIPT, f"--features={features}", f"--kill={kill}", workers=2)
    assert run.undone(kill) == []
    assert_equal_everywhere(run, alone)
    assert_saved_alike(run, alone)


def assert_saved_alike(run, alone):
    names = {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
    saved = {path.parent.name for path in alone.directory.glob("out/*/trainer_state.json")}
    assert saved
    for folder in saved:
        ours, theirs = (one.directory / "out" / folder for one in (run, alone))
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} >= names
        for name in names - {"trainer_state.json"}:  # which has times in it
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


@pytest.mark.soak
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("features", ["checkpoint,tb", "plateau,early", "shared"])
def test_the_number_of_workers_changes_anywhere(runs, features, story):
    alone = runs(SCRIPT, f"--features={features}")
    run = runs(SCRIPT, f"--features={features}", STORIES[story], workers=2)
    assert_equal_everywhere(run, alone)
    if story.startswith("adoption"):
        is_reached = alone.num_steps() > int(STORIES[story].rpartition(":")[2])  # not stopped before
        assert (run.directory / "adopted").exists() == is_reached
    else:
        assert run.undone(STORIES[story], alone.num_steps()) == []


def test_what_a_job_cannot_do_is_refused_with_the_alternative(runs):
    refused = json.loads((runs(SCRIPT, *ALONE).directory / "refused.json").read_text())
    for name, part in {
        "accumulate": "use num_slots",
        "find": "set the batch size",
        "sampler": "expected shuffle=True or shuffle=False",
        "iterable": "use phalanx.data.ShardedDataset",
        "metrics": "use evaluate='everywhere'",
        "deepspeed": "use phalanx.fsdp.fully_shard with phalanx.elastic.Job",
        "fsdp": "use phalanx.fsdp.fully_shard with phalanx.elastic.Job",
        "fsdp of accelerate": "use phalanx.fsdp.fully_shard with phalanx.elastic.Job",
        "lbfgs": "does not take LBFGS: it computes the gradient several times in a step",
        "second": "train once per process",
    }.items():
        assert part in refused[name], name


@pytest.mark.soak
def test_a_run_goes_on_from_the_trainers_own_checkpoint(runs):
    alone = runs(SCRIPT, "--features=checkpoint")
    (expected,) = alone.results().values()
    path = alone.directory / "out" / "checkpoint-15"
    run = runs(SCRIPT, f"--resume={path}", "--kill=0:16:reduced", workers=2)
    for found in run.results().values():
        assert (found["digest"], found["lr"], found["step"]) == (expected["digest"], expected["lr"], expected["step"])
