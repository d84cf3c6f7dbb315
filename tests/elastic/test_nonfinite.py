"""A step or a state that is not finite stops the job, on all workers alike, and is never applied or saved."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from elastic_training import Kink
from torch import nn

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import DataOptions, Guard, Job, NonFinite, Outcome, RunOptions, Saves
from phalanx.elastic._guard import BAD_GRADIENT, Reaction, SlotReport, StepFacts, decide, explain
from phalanx.elastic._guarding import is_finite
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint._save_folder import find_save, good_save

NAN, INF = math.nan, math.inf
STEP, SLOT = 2, 3


class Rows(torch.utils.data.Dataset):
    def __init__(self, length: int = 80) -> None:
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def make(group=None, *, model=None, lr=0.1, log_dir=None, **keywords) -> Job:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    run = RunOptions(progress=False, group=group, log_dir=log_dir)
    return Job(model, optimizer, Rows(), num_slots=4, slot_batch_size=2, run=run, **keywords)


def plain(step, micro):
    return step.job.model(micro.batch).square().mean()


def unspoilt(step, micro, loss):
    return loss


def nothing(step):
    pass


def train(job, spoil=unspoilt, max_steps=6, *, begin=nothing, reduced=nothing, after=nothing, **commit):
    outcomes = []
    for step in job.steps(max_steps=max_steps):
        job.saving.wait_idle()
        begin(step)
        for micro in step:
            micro.backward(spoil(step, micro, plain(step, micro)))
        if reduced is not nothing and step.reduce():
            reduced(step)
        outcomes.append(step.commit(**commit))
        after(step)
    return outcomes


def at_fault(change):
    return lambda step, micro, loss: change(loss) if (step.number, micro.slot) == (STEP, SLOT) else loss


def nan_loss(loss):
    return loss * NAN


def bad_gradient(loss):
    return Kink.apply(loss, INF)


def infinite_loss_finite_gradient(loss):
    return loss + INF


def stopped(job, spoil, **commit):
    """The error, whether the state is that before the step, and how many steps were committed."""
    digests = []
    with pytest.raises(NonFinite) as caught:
        train(job, spoil, begin=lambda step: digests.append((step.number, job.digest())), **commit)
    return caught.value, digests[-1] == (STEP, job.digest()), job.step


# -- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (StepFacts(loss=1.0), Reaction.GO_ON),
        (StepFacts(loss=None), Reaction.GO_ON),
        (StepFacts(loss=NAN), Reaction.COMPUTE_AGAIN),
        (StepFacts(loss=NAN, is_again=True), Reaction.STOP),
        (StepFacts(loss=-INF, is_again=True), Reaction.STOP),
        (StepFacts(loss=NAN, grads=("w",)), Reaction.COMPUTE_AGAIN),
        (StepFacts(loss=NAN, grads=("w",), is_again=True), Reaction.STOP),
        (StepFacts(loss=1.0, grads=("w",)), Reaction.COMPUTE_AGAIN),
        (StepFacts(loss=1.0, grads=("w",), is_again=True), Reaction.STOP),
        (StepFacts(loss=1.0, is_again=True), Reaction.GO_ON),
        (StepFacts(loss=1.0, buffers=("b",)), Reaction.STOP),
        (StepFacts(loss=1.0, grad_norm=INF), Reaction.STOP),
        (StepFacts(loss=NAN, grads=("w",), scale=1024.0), Reaction.LEAVE_TO_SCALER),
        (StepFacts(loss=NAN, grads=("w",), buffers=("b",), scale=1.0), Reaction.LEAVE_TO_SCALER),
        (StepFacts(loss=NAN, scale=1024.0), Reaction.COMPUTE_AGAIN),
        (StepFacts(loss=NAN, scale=1024.0, is_again=True), Reaction.STOP),
        (StepFacts(loss=1.0, buffers=("b",), scale=1024.0), Reaction.STOP),
        (StepFacts(loss=NAN, grads=("w",), scale=1e-9, is_again=True), Reaction.STOP),
    ],
)
def test_the_decision_is_a_function_of_facts_that_all_workers_have(facts, wanted):
    assert decide(Guard(), facts) is wanted
    assert decide(Guard(nonfinite="ignore"), facts) is Reaction.GO_ON


@pytest.mark.fast
def test_mistakes_in_the_guard_are_named_and_long_lists_are_cut():
    with pytest.raises(ValueError, match="nonfinite is 'maybe'; expected 'stop', 'skip', 'raise' or 'ignore'"):
        Guard(nonfinite="maybe")
    reports = [SlotReport(slot, "w", tuple(range(20)), BAD_GRADIENT) for slot in range(12)]
    text = explain(1, 0, StepFacts(loss=1.0, grads=tuple("abcdefghijkl")), reports, ())
    assert "a, b, c, d, e, f, g, h and 4 more" in text
    assert "and 4 more slots" in text
    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in text


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_finite_values_whose_sum_overflows_are_finite(dtype):
    most = torch.finfo(dtype).max
    assert is_finite(torch.full((300,), most, dtype=dtype))
    for bad in (NAN, INF, -INF):
        values = torch.zeros(300, dtype=dtype)
        values[299] = bad
        assert not is_finite(values)
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.ones(3, dtype=torch.int64))


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (nan_loss, "loss is nan"),
        (infinite_loss_finite_gradient, "loss is infinite"),
        (bad_gradient, "gradient is not finite"),
    ],
)
def test_the_job_stops_before_the_update_and_names_the_slot(change, told):
    def main(group):
        error, is_as_before, step = stopped(make(group), at_fault(change))
        return str(error), error.step, error.slots, is_as_before, step

    alone = main(None)
    samples = tuple(make().schedule.sampler.indices(STEP, SLOT))
    assert alone[1:] == (STEP, {SLOT: samples}, True, STEP)
    assert f"slot {SLOT} (worker rank0): {told}; samples {', '.join(map(str, samples))}" in alone[0]
    for size in (3, 5):
        results = simulate(size).run(main)
        assert len(set(map(str, results))) == 1, "all workers say the same"
        assert results[0][1:] == alone[1:]
        assert f"slot {SLOT} (worker rank{size - 1}): {told}" in results[0][0]


@pytest.mark.fast
def test_ignoring_trains_on():
    job = make(guard=Guard(nonfinite="ignore"))
    assert train(job, at_fault(nan_loss)) == [Outcome.APPLIED] * 6
    assert job.model.weight.isnan().all()


@pytest.mark.fast
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_gradient_that_is_finite_when_computed_again_counts(tmp_path, num_workers):
    """As after a fault of the hardware; the audit shows one attempt that counted."""
    spoiled = []

    def once(step, micro, loss):
        if (step.number, micro.slot) == (STEP, SLOT) and not spoiled:
            spoiled.append(step.number)
            return bad_gradient(loss)
        return loss

    job = make(log_dir=tmp_path, data=DataOptions(num_workers=num_workers))
    with pytest.warns(RuntimeWarning, match="the gradient of step 2 was not finite and is when computed again"):
        outcomes = train(job, once)
    assert outcomes == [Outcome.APPLIED] * 2 + [Outcome.DROPPED] + [Outcome.APPLIED] * 4
    job.close()
    undisturbed = make()
    train(undisturbed)
    assert job.digest() == undisturbed.digest()
    verdict = check_directory(tmp_path)
    assert (verdict.problems, verdict.num_dropped) == ([], 4)


@pytest.mark.fast
def test_a_sum_or_a_norm_that_overflows_stops_the_job_too():
    many = lambda step, micro, loss: loss * 0 + 2e38 if step.number == STEP else loss  # noqa: E731
    error, is_as_before, _ = stopped(make(), many)
    assert is_as_before
    assert "every slot for itself is finite" in str(error)
    large = lambda step, micro, loss: Kink.apply(loss, 1e25 if step.number == STEP else 1.0)  # noqa: E731
    error, is_as_before, _ = stopped(make(), large, max_grad_norm=1.0)
    assert is_as_before
    assert "the gradient's norm is inf" in str(error)


@pytest.mark.fast
def test_gradients_that_the_user_mends_or_spoils_between_reduce_and_commit_are_those_that_count():
    def mend(step):
        for param in step.job.params:
            param.grad = torch.nan_to_num(param.grad, posinf=0.0, neginf=0.0)

    def spoil(step):
        step.job.model.weight.grad = step.job.model.weight.grad * NAN

    assert train(make(), at_fault(bad_gradient), max_steps=3, reduced=mend) == [Outcome.APPLIED] * 3
    with pytest.raises(NonFinite, match="the gradient of weight has nan"):
        train(make(), reduced=spoil)


class WithBuffers(nn.Module):
    """A mask of -inf that is meant to be, and a statistic that a bad batch spoils."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((2, 2), -INF).triu(1))
        self.register_buffer("largest", torch.zeros(()))
        self.spoil = False

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().max() * (INF if self.spoil else 1.0))
        return self.linear(x)


@pytest.mark.fast
def test_buffers_that_become_infinite_stop_the_job_and_those_that_were_do_not():
    def main(group):
        job = make(group, model=WithBuffers())

        def begin(step):
            job.model.spoil = step.number == STEP and 0 in step.slots

        def only_slot_0(step, micro, loss):
            job.model.spoil = step.number == STEP - 1  # of other slots than 0, whose buffers nobody keeps
            return loss

        with pytest.raises(NonFinite, match="slot 0 made the buffer largest nan or infinite") as caught:
            train(job, only_slot_0, begin=begin)
        return job.step, list(caught.value.slots), bool(job.model.largest.isfinite())

    assert main(None) == (STEP, [0], True)
    assert simulate(3).run(main) == [(STEP, [0], True)] * 3


@pytest.mark.fast
def test_a_weight_that_is_not_finite_is_refused_and_a_slot_of_weight_zero_left_out():
    for step in make().steps(max_steps=1):
        for micro in step:
            for weight in (NAN, INF):
                with pytest.raises(ValueError, match="expected a finite number, at least 0"):
                    micro.backward(plain(step, micro), weight=weight)
            micro.backward(plain(step, micro) * (NAN if micro.slot == SLOT else 1), weight=float(micro.slot != SLOT))
        assert step.commit() is Outcome.APPLIED


@pytest.mark.fast
def test_a_scaler_skips_but_not_for_ever_and_not_when_it_is_disabled():
    def job_with(enabled, scale):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
        return make(model=WithBuffers(), scaler=scaler)

    job = job_with(True, 2.0**10)
    weights = []
    for step in job.steps(max_steps=4):
        job.model.spoil = step.number == STEP
        for micro in step:
            micro.backward(plain(step, micro) * (NAN if step.number == STEP else 1))
        assert step.commit(max_grad_norm=1.0) is Outcome.APPLIED
        weights.append(job.model.linear.weight.clone())
    assert torch.equal(weights[STEP], weights[STEP - 1])
    assert not torch.equal(weights[STEP], weights[STEP + 1])
    assert job.model.largest.isfinite(), "a step that is skipped leaves no infinite buffer behind"
    with pytest.raises(NonFinite, match=r"lowered its scale to 5\.82077e-11 in vain"):
        train(job_with(True, 2.0**-34), at_fault(nan_loss))
    with pytest.raises(NonFinite):
        train(job_with(False, 1.0), at_fault(nan_loss))
    skipping = job_with(True, 2.0**-3)
    with pytest.raises(NonFinite, match="in vain"):
        train(skipping, lambda step, micro, loss: loss * NAN, max_steps=50)


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("every", [1, None])
def test_a_state_that_the_update_made_infinite_is_not_saved_and_does_not_leave_the_loop(tmp_path, every):
    """The gradient is finite; times the learning rate it is not."""

    def main(group):
        job = make(group, lr=1e10, saves=Saves(directory=tmp_path, every=every))
        error = None
        try:
            train(
                job,
                lambda step, micro, loss: Kink.apply(loss, 1e29) if step.number == STEP else loss * 0,
                STEP + 1,
            )
        except NonFinite as caught:
            error = str(caught)
        if every is None:
            with pytest.raises(NonFinite):
                job.save()
        return error

    results = simulate(2).run(main)
    assert results[0] == results[1]
    assert "after the update of step 2 the state is not finite: weight, bias" in results[0]
    save, problems = find_save(tmp_path)
    assert problems == []
    if every is None:
        assert save is None
        return
    assert save.step == STEP
    model = save.state()["parts"]["model"]
    assert all(is_finite(value) for value in model.values())


@pytest.mark.fast
@pytest.mark.parametrize(("nonfinite", "good"), [("skip", 2), ("raise", 2), ("stop", 8), ("ignore", None)])
def test_the_last_good_save_stays_outside_of_the_rotation_while_a_guard_looks(tmp_path, nonfinite, good):
    """Steps 5, 7 and 9 are bad: only that of step 2 was followed by sound steps up to the next save."""
    job = make(guard=Guard(nonfinite=nonfinite), saves=Saves(directory=tmp_path, every=2, keep=1))
    bad, caught = (5, 7, 9) if nonfinite in ("skip", "raise") else (), []
    for step in job.steps(max_steps=10):
        job.saving.wait_idle()
        for micro in step:
            micro.backward(plain(step, micro) + (NAN if step.number in bad else 0.0))
        try:
            step.commit()
        except NonFinite as error:
            caught.append(error.step)
    assert caught == (list(bad) if nonfinite == "raise" else [])
    job.saving.wait_idle()
    job.close()
    left = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
    assert left == ([good, 10] if good else [10])
    assert good_save(tmp_path) == (f"step-{good:012d}" if good else "")


@pytest.mark.fast
def test_weights_that_were_infinite_before_are_named_as_the_cause():
    def spoil(step):
        with torch.no_grad():
            step.job.model.weight.fill_(NAN)

    with pytest.raises(NonFinite, match="before the step the state was not finite already: weight"):
        train(make(), after=spoil)


# -- processes --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import torch
from phalanx.elastic import Guard, Job, RunOptions, Saves

out = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), data, num_slots=4, slot_batch_size=2,
          saves=Saves(directory=out / "saves", every=1, keep=2), guard=Guard(nonfinite=sys.argv[2]),
          run=RunOptions(progress=False, threads=1, log_dir=out / "logs"))
(out / f"began-{job.worker_id}").touch()
for step in job.steps(max_steps=12):
    job.saving.wait_idle()
    for micro in step:
        loss = model(micro.batch[0]).square().mean()
        micro.backward(loss * float("nan") if (step.number, micro.slot) == (5, 2) else loss)
    step.commit()
"""


def phalanx_run(tmp_path, nonfinite):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal",
               "--preload=torch._dynamo,phalanx.elastic", str(script), str(tmp_path), nonfinite]  # fmt: skip
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


@pytest.mark.timeout(200)
def test_phalanx_run_with_skip_leaves_the_bad_step_out_and_ends_well(tmp_path):
    done = phalanx_run(tmp_path, "skip")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("began-*"))) == 2, "nobody was replaced for it"
    verdict = check_directory(tmp_path / "logs")
    assert (verdict.problems, verdict.num_steps, list(verdict.left_out)) == ([], 12, [5])
    lines = [line for path in (tmp_path / "logs").glob("events-*") for line in read_lines(path)]
    skipped = [(line["step"], line["reason"]) for line in lines if line["event"] == "skipped"]
    assert skipped == [(5, "the loss is nan, the gradient of weight, bias has nan or infinite values")] * 2
    save, _ = find_save(tmp_path / "saves")
    assert save.step == 12
    assert all(is_finite(value) for value in save.state()["parts"]["model"].values())


@pytest.mark.timeout(200)
def test_phalanx_run_ends_with_an_error_replaces_nobody_and_the_last_good_save_stays(tmp_path):
    done = phalanx_run(tmp_path, "stop")
    assert done.returncode != 0
    assert len(list(tmp_path.glob("began-*"))) == 2, "nobody was started in their place"
    assert "NonFinite: step 5 of epoch 0 is not finite: the loss is nan" in done.stderr
    assert "slot 2 (worker " in done.stderr
    assert "it stopped the job" in done.stderr
    assert sorted(path.name for path in Path(tmp_path / "saves").iterdir()) == [
        "last-good",
        "owner",
        "step-000000000004",
        "step-000000000005",
    ]
    save, _ = find_save(tmp_path / "saves")
    assert all(is_finite(value) for value in save.state()["parts"]["model"].values())
