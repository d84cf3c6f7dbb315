"""The job as its user sees it: mistakes are named, weights weigh, precision mixes, evaluation counts once."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading

import pytest
import torch
from elastic_training import Pictures, make_job, train
from torch import nn
from torch.nn import functional as F

from phalanx.comm import Group, observe, simulate
from phalanx.elastic import BitsWarning, DataOptions, Job, RunOptions, Saves, WorkersDiffer
from phalanx.elastic._loading import split
from phalanx.errors import RankFailed

pytestmark = pytest.mark.fast

QUIET = RunOptions(progress=False)


class Rows(torch.utils.data.Dataset):
    def __init__(self, length: int = 64) -> None:
        self.x = torch.randn(length, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def linear_job(group=None, *, lr=0.1, length=64, model=None, **keywords) -> Job:
    torch.manual_seed(0)
    model = model or nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    keywords.setdefault("run", RunOptions(progress=False, group=group))
    return Job(model, optimizer, Rows(length), num_slots=4, slot_batch_size=4, seed=0, **keywords)


# -- mistakes -------------------------------------------------------------------------------------------------------


def run_loop(job, *, compute=True, backward=True, commit=True):
    for step in job.steps(epochs=1):
        for micro in step if compute else ():
            if backward:
                micro.backward(linear_loss(step, micro))
        if commit:
            step.commit()


def test_an_optimizer_that_needs_several_gradients_in_a_step_is_refused():
    model = nn.Linear(6, 1)
    with pytest.raises(ValueError, match="a Job cannot use LBFGS: it computes the gradient several times in a step"):
        Job(model, torch.optim.LBFGS(model.parameters()), Rows(), num_slots=4, slot_batch_size=4, run=QUIET)


def test_a_loop_without_backward_or_commit_is_an_error():
    with pytest.raises(RuntimeError, match=r"micro.backward\(loss\) was not called for slot 0 of step 0"):
        run_loop(linear_job(), backward=False)
    with pytest.raises(RuntimeError, match=r"step 0 was not committed; call step.commit\(\)"):
        run_loop(linear_job(), commit=False)
    with pytest.raises(RuntimeError, match=r"slots \[0, 1, 2, 3\] of this worker were not computed"):
        run_loop(linear_job(), compute=False)


def linear_loss(step, micro):
    return step.job.model(micro.batch).square().mean()


def test_backward_twice_or_with_a_negative_weight_is_an_error():
    for step in linear_job().steps(max_steps=1):
        for micro in step:
            loss = linear_loss(step, micro)
            with pytest.raises(ValueError, match=r"weight is -1\.0"):
                micro.backward(loss, weight=-1)
            micro.backward(loss)
            with pytest.raises(RuntimeError, match="backward was called twice for slot"):
                micro.backward(loss)
            with pytest.raises(TypeError, match=r"not a pair; use micro\.batch"):
                micro.inputs  # noqa: B018
        assert step.commit()
        with pytest.raises(RuntimeError, match="step 0 is committed already"):
            step.commit()


def test_mistakes_in_the_constructor_are_named():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="not the model's"):
        Job(model, torch.optim.SGD(nn.Linear(2, 1).parameters()), Rows(), num_slots=1, slot_batch_size=1)
    with pytest.raises(TypeError, match=r"state\['x'\] is a int without state_dict"):
        linear_job(state={"x": 3})
    with pytest.raises(ValueError, match="expected 'uneven' or 'drop'"):
        DataOptions(tail="pad")
    with pytest.raises(ValueError, match="steps\\(\\) needs epochs or max_steps"):
        next(linear_job().steps())
    with pytest.raises(RuntimeError, match="has not begun"):
        linear_job().rank  # noqa: B018


def test_unfreezing_after_the_job_was_made_is_an_error():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    job = linear_job(model=model)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight did not require a gradient when the job was made"):
        next(job.steps(epochs=1))


def test_sparse_gradients_are_refused():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3, sparse=True)

        def forward(self, x):
            return self.table((x > 0).long())

    with pytest.raises(TypeError, match=r"table\.weight has a torch\.sparse_coo gradient"):
        run_loop(linear_job(model=Lookup()))


def hidden(width=3, **keywords):
    return nn.Sequential(nn.Linear(6, width, **keywords), nn.BatchNorm1d(width), nn.Linear(width, 1))


def frozen(model):
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            lambda: hidden(4),
            "parameter 0.weight is float32 (3, 6) on worker rank0 and float32 (4, 6) on rank2; "
            "parameter 0.bias is float32 (3,) on worker rank0 and float32 (4,) on rank2; "
            "parameter 1.weight is float32 (3,) on worker rank0 and float32 (4,) on rank2; 4 more differ",
        ),
        (lambda: hidden(bias=False), "parameter 0.bias is only on rank0"),
        (
            lambda: frozen(hidden()),
            "parameter 2.bias is float32 (1,) on worker rank0 and float32 (1,), frozen on rank2",
        ),
        (
            lambda: nn.Sequential(*hidden()[:2], nn.Linear(3, 1, dtype=torch.float64)),
            "parameter 2.weight is float32 (1, 3) on worker rank0 and float64 (1, 3) on rank2",
        ),
    ],
)
def test_workers_that_run_different_models_are_told_which_parameter_differs(other, told):
    def main(group):
        job = linear_job(group, model=hidden() if group.rank < 2 else other())
        with pytest.raises(WorkersDiffer) as caught:
            next(job.steps(epochs=1))
        return str(caught.value)

    (message,) = set(simulate(3).run(main))
    assert f"the models differ: {told}" in message
    assert "all workers must run the same script with the same arguments" in message


def test_models_that_differ_in_order_only_are_told_apart():
    from phalanx.elastic.membership._sync import tell_apart

    one = {"parameter a": "float32 ()", "parameter b": "float32 ()"}
    told = tell_apart("x", one, "y", dict(reversed(one.items())))
    assert told == "parameters and buffers come in another order: parameter a on worker x where parameter b is on y"


def test_workers_that_run_different_jobs_are_told_so():
    def main(group):
        model = nn.Linear(6, 1)
        kind = torch.optim.SGD if group.rank == 0 else torch.optim.Adam
        run = RunOptions(progress=False, group=group)
        job = Job(model, kind(model.parameters()), Rows(), num_slots=4, slot_batch_size=4, run=run)
        next(job.steps(epochs=1))

    with pytest.raises(RankFailed) as caught:
        simulate(2).run(main)
    assert isinstance(caught.value.__cause__, WorkersDiffer)
    told = "optimizer is 'SGD of 2 parameters' on worker rank0 and 'Adam of 2 parameters' on rank1"
    assert told in str(caught.value.__cause__)


def test_unequal_machines_are_warned_of():
    from phalanx.elastic.membership._rounds import Membership
    from phalanx.elastic.membership._sync import check_same, fingerprint

    told = [{"job": {}, "machine": {**fingerprint(nn.Linear(1, 1)), "threads": threads}} for threads in (1, 1, 2)]
    with pytest.warns(BitsWarning, match="workers a and c differ in threads 1 and 2"):
        check_same(Membership(0, 0, ("a", "b", "c"), 0, None), told, job=None)


def test_a_save_of_an_unequal_machine_is_warned_of(tmp_path, monkeypatch):
    from phalanx.elastic import _job_state

    job = linear_job(saves=Saves(directory=tmp_path))
    run_loop(job)
    job.save()
    again = linear_job(saves=Saves(directory=tmp_path))
    unlike = {**job.state_dict()["machine"], "threads": 77}
    monkeypatch.setattr(_job_state, "fingerprint", lambda model: unlike)
    with pytest.warns(BitsWarning, match=r"the save and this worker differ in threads \d+ and 77"):
        assert again.load_save()


# -- what a step computes ---------------------------------------------------------------------------------------------


def test_the_gradient_is_the_weighted_mean_over_all_slots():
    """A loss over tokens: each slot's mean, weighted by its tokens, is the mean over all tokens."""

    def main(group):
        job = linear_job(group, lr=0.0)
        grads = []
        for step in job.steps(epochs=1):
            for micro in step:
                keep = micro.batch[:, 0] > 0
                losses = job.model(micro.batch).square().squeeze(1)[keep]
                micro.backward(losses.mean(), weight=int(keep.sum()))
            assert step.reduce()
            grads.append(job.model.weight.grad.clone())
            step.commit()
        return grads, job.loss

    grads, loss = main(None)
    model = linear_job().model
    rows = Rows()
    sampler = linear_job().schedule.sampler
    wanted = []
    for step in range(4):
        x = rows.x[[i for slot in range(4) for i in sampler.indices(step, slot)]]
        model.zero_grad()
        total = model(x[x[:, 0] > 0]).square().mean()
        total.backward()
        wanted.append(model.weight.grad.clone())
    for got, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, right)
    assert loss == pytest.approx(total.item(), rel=1e-6)
    for other, other_loss in simulate(3).run(main):
        assert all(torch.equal(a, b) for a, b in zip(grads, other, strict=True))
        assert other_loss == loss


def test_a_slot_of_weight_zero_counts_for_nothing_even_if_its_loss_is_nan():
    job = linear_job(lr=1.0)
    for step in job.steps(max_steps=1):
        for micro in step:
            loss = linear_loss(step, micro)
            micro.backward(loss if micro.slot else loss * torch.nan, weight=float(micro.slot > 0))
        step.commit()
    assert torch.isfinite(job.model.weight).all()
    assert step.loss == step.loss, "nan"


def test_clipping_uses_the_norm_of_the_reduced_gradient():
    job = linear_job(lr=0.0)
    for step in job.steps(max_steps=1):
        for micro in step:
            micro.backward(linear_loss(step, micro) * 1000)
        step.reduce()
        norm = torch.cat([p.grad.flatten() for p in job.model.parameters()]).norm()
        step.commit(max_grad_norm=1.0)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        clipped = torch.cat([p.grad.flatten() for p in job.model.parameters()]).norm()
        assert clipped.item() == pytest.approx(1.0, rel=1e-4)


def test_a_gradient_scaler_skips_a_step_that_overflows_on_all_workers_alike():
    def main(group):
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        run = RunOptions(progress=False, group=group)
        job = Job(model, optimizer, Rows(), num_slots=4, slot_batch_size=4, scaler=scaler, run=run)
        weights, scales = [model.weight.clone()], []
        for step in job.steps(epochs=1):
            for micro in step:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(micro.batch).square().mean()
                micro.backward(loss * torch.inf if (step.number, micro.slot) == (1, 3) else loss)
            step.commit(max_grad_norm=1.0)
            weights.append(model.weight.clone())
            scales.append(scaler.get_scale())
        return [torch.equal(a, b) for a, b in itertools.pairwise(weights)], scales, job.digest()

    alone = main(None)
    assert alone[0] == [False, True, False, False]
    assert alone[1] == [1024.0, 512.0, 512.0, 1024.0]
    assert simulate(3).run(main) == [alone] * 3


def test_a_half_precision_model_trains_with_the_same_bits():
    def main(group):
        torch.manual_seed(0)
        job = linear_job(group, model=nn.Linear(6, 1, dtype=torch.bfloat16))
        for step in job.steps(epochs=1):
            for micro in step:
                micro.backward(job.model(micro.batch.bfloat16()).square().mean())
            step.commit()
        return job.digest(), job.loss

    assert len({main(None), *simulate(3).run(main)}) == 1


def test_the_steady_state_has_two_collectives_per_step():
    names = []

    def main(group):
        first = None
        job = linear_job(group)
        for step in job.steps(epochs=1):
            first = len(names) if first is None else first
            for micro in step:
                micro.backward(linear_loss(step, micro))
            step.commit()
        return first

    with observe(lambda event: names.append(event.name) if event.group.rank == 0 else None):
        first = simulate(2).run(main)[0]
    assert names[first:] == ["all_to_all", "all_gather_into_tensor"] * 4 + ["barrier"]


def test_a_short_last_step_counts_every_sample_once():
    job = linear_job(length=37)
    seen, sizes = [], []
    for step in job.steps(epochs=1):
        for micro in step:
            seen += micro.indices
            micro.backward(linear_loss(step, micro))
        step.commit()
        sizes.append(step.num_samples)
    assert sorted(seen) == list(range(37))
    assert sizes == [16, 16, 5]
    assert step.is_last_of_epoch


def test_dropping_the_tail():
    job = linear_job(length=37, data=DataOptions(tail="drop"))
    numbers = []
    for step in job.steps(epochs=2):
        for micro in step:
            micro.backward(linear_loss(step, micro))
        step.commit()
        numbers.append((step.epoch, step.num_samples, step.is_last_of_epoch))
    assert numbers == [(0, 16, False), (0, 16, True), (1, 16, False), (1, 16, True)]


def test_parts_are_never_empty():
    assert split([1, 2, 3], 5) == [(1,), (2,), (3,)]
    assert split([], 2) == []


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_sees_every_sample_once_and_has_the_same_bits_at_any_size():
    def main(group):
        job = make_job(run=RunOptions(progress=False, group=group))
        seen, results = [], []

        def score(batch):
            seen.extend(batch[1].tolist())
            return {"loss": F.cross_entropy(job.model(batch[0]), batch[1])}

        for step in job.steps(max_steps=2):
            for micro in step:
                micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            step.commit()
            results.append(job.evaluate(Pictures(50), score, batch_size=8)["loss"])
            assert job.model.training
        results.append(job.evaluate(Pictures(50), score, batch_size=8)["loss"])
        return len(seen), results

    count, alone = main(None)
    assert count == 150
    assert alone[0] != alone[1]
    for size in (2, 3):
        results = simulate(size).run(main)
        assert sum(count for count, _ in results) == 150
        assert all(found == alone for _, found in results)


def test_an_evaluation_does_not_depend_on_those_before_it():
    """A job that all workers left during an evaluation resumes behind it; what follows must not notice."""

    def main(evaluated):
        job = make_job(run=RunOptions(progress=False))
        results = {}
        for step in job.steps(max_steps=4):
            for micro in step:
                micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            step.commit()
            if step.number in evaluated:
                results[step.number] = job.evaluate(
                    Pictures(50), lambda b: {"loss": F.cross_entropy(job.model(b[0]), b[1])}, batch_size=8
                )
        return results

    assert main([1, 3])[3] == main([3])[3]


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_events_tell_the_story(tmp_path):
    job = make_job(run=RunOptions(progress=False, log_dir=tmp_path), saves=Saves(directory=tmp_path / "saves", every=3))
    train(job, max_steps=4)
    job.close()
    events = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event["event"] not in ("saved", "times")]
    assert kinds == ["started", "regrouped", "step", "step", "step", "step", "finished"]
    times = [event for event in events if event["event"] == "times"]  # one a second, and one at the end
    told = [step for event in times for step in range(event["step"], event["step"] + len(event["compute"]))]
    assert told == [0, 1, 2, 3]
    assert events[0]["pid"] == os.getpid()
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [0, 1, 2, 3]
    assert steps[-1]["loss"] == job.loss


def test_progress_is_plain_lines_when_not_on_a_terminal(capsys):
    job = linear_job(run=RunOptions(progress=True))
    for step in job.steps(max_steps=1):
        for micro in step:
            micro.backward(linear_loss(step, micro))
        step.commit()
    line = capsys.readouterr().err
    assert line.startswith("phalanx: step 0  epoch 0  loss ")
    assert "generation 0  1 worker" in line


def read_to_end(terminal: int, into: bytearray) -> None:
    while not into.endswith(b"END"):  # a terminal hands out what it has: one read is not all of it
        into += os.read(terminal, 1 << 16)


def test_progress_is_one_live_line_on_a_terminal(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        shown = bytearray()
        reader = threading.Thread(target=read_to_end, args=(ours, shown), daemon=True)
        reader.start()  # a terminal takes a few thousand bytes and then waits for its reader
        job = linear_job(run=RunOptions(progress=True))
        for step in job.steps(max_steps=2):
            for micro in step:
                micro.backward(linear_loss(step, micro))
            step.commit()
        job.close()
        terminal.write("END")
        terminal.flush()
        reader.join(60)
        assert not reader.is_alive(), "the terminal was not read to its end"
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "step 1" in shown
    assert "samples/s" in shown
    assert "generation 0  1 worker" in shown
    assert "phalanx:" not in shown, "plain lines are for logs"


def test_an_optimizer_state_wider_than_its_parameter_survives(tmp_path):
    from phalanx.elastic.checkpoint._state import StatefulObjects

    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.full_like(state["momentum_buffer"], 1 / 3, dtype=torch.float32)
    parts = StatefulObjects(model, optimizer, {})
    parts.apply(parts.capture())
    found = {state["momentum_buffer"].dtype for state in optimizer.state.values()}
    assert found == {torch.float32}


def test_a_loss_in_a_fixed_group_is_raised_to_whoever_restarts_it():
    from phalanx.comm.faults import kill_at, play
    from phalanx.errors import PeerLost

    def main(group: Group):
        job = linear_job(group)
        try:
            for step in job.steps(epochs=1):
                for micro in step:
                    micro.backward(linear_loss(step, micro))
                step.commit()
        except PeerLost:
            return job.step
        return None

    with play(kill_at(rank=1, step=2, name="all_to_all")):
        assert simulate(3).run(main) == [2, None, 2]
