"""Guards that leave steps out, name where it began, and go back to a good save: alike on all workers, same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import Die, World
from torch import nn

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import Guard, Job, LossSpike, NonFinite, Outcome, RunOptions, Saves, _rollback
from phalanx.elastic._first_nonfinite import FirstNonFinite
from phalanx.elastic._guard import Reaction, StepFacts, decide
from phalanx.elastic._guard_record import (
    WARM_UP,
    GuardRecord,
    after_rollback,
    after_skip,
    after_update,
    find_spike,
    median_of,
)
from phalanx.elastic._guarding import is_finite
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint._save_folder import GOOD, good_save, list_saves
from phalanx.elastic.checkpoint._saves import step_of
from phalanx.elastic.checkpoint._stream import receive_state, send_state
from phalanx.errors import PeerLost
from phalanx.protocol import broken_key

pytestmark = pytest.mark.fast

NAN = math.nan
NUM_STEPS, BAD = 30, 22
SIZES = (1, 3)


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def make(group=None, *, model=None, log_dir=None, **keywords) -> Job:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    run = RunOptions(progress=False, group=group, log_dir=log_dir, threads=1)
    return Job(model, optimizer, Rows(), num_slots=4, slot_batch_size=2, run=run, scheduler=scheduler, **keywords)


Spoil = Callable[[Any, Any, torch.Tensor], torch.Tensor]


def train(job: Job, spoil: Spoil, max_steps: int = NUM_STEPS, *, before=lambda step: None, where=None) -> list:
    """Outcomes of all steps; ``where`` is told which step and slot is computed."""
    outcomes = []
    for step in job.steps(max_steps=max_steps):
        job.saving.wait_idle()
        before(step)
        for micro in step:
            if where is not None:
                where[:] = [step.number, micro.slot]
            micro.backward(spoil(step, micro, (job.model(micro.batch) + 1.0).square().mean()))
        outcomes.append(step.commit())
    job.saving.wait_idle()
    return outcomes


def nan_at(*steps: int) -> Spoil:
    return lambda step, micro, loss: loss * NAN if step.number in steps and micro.slot == 1 else loss


def spike_at(*steps: int) -> Spoil:
    return lambda step, micro, loss: loss * 1000 if step.number in steps else loss


def sound(step, micro, loss):
    return loss


def on_all_sizes(main: Callable[[Any], Any]) -> Any:
    """What each worker returns: the same on all, for any number of them."""
    found = [main(None)]
    for size in SIZES[1:]:
        found += simulate(size).run(main)
    assert all(one == found[0] for one in found), found
    return found[0]


# -- decisions --------------------------------------------------------------------------------------------------------

floats = st.floats(0.001, 100.0)


@given(st.lists(st.one_of(floats, st.none(), st.just(NAN)), max_size=60), st.integers(WARM_UP, 20), st.floats(1.5, 20))
def test_a_spike_is_what_exceeds_the_median_of_the_steps_before(losses, window, factor):
    """Against the definition: finite losses of applied steps, the last ``window`` of them, the lower middle."""
    record, seen = GuardRecord(), []
    for step, loss in enumerate(losses):
        last = seen[-window:]
        expected = loss is not None and len(last) >= WARM_UP and loss > factor * sorted(last)[(len(last) - 1) // 2]
        assert bool(find_spike(record, factor, loss, None)) == expected
        if not expected:
            record = after_update(record, step, loss, None, window)
            seen += [loss] if loss is not None and math.isfinite(loss) else []
    assert record.losses == tuple(seen[-window:])
    assert GuardRecord.from_state(record.to_state()) == record
    assert GuardRecord.from_state(None) == GuardRecord()


def test_medians_that_are_not_positive_measure_nothing_and_norms_count_too():
    assert not find_spike(GuardRecord(losses=(-1.0,) * 20), 2.0, 5.0, None)
    assert "the gradient's norm is 9" in find_spike(GuardRecord(norms=(1.0,) * 20), 2.0, 5.0, 9.0)
    assert median_of([3.0, 1.0, 2.0, 4.0]) == 2.0


@given(st.sampled_from(["stop", "skip", "raise", "ignore"]), st.sampled_from(["skip", "stop", "rollback"]),
       st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())  # fmt: skip
def test_limits_hold_and_a_sound_step_always_goes_on(nonfinite, on_spike, skips, rollbacks, is_bad, is_spike, is_again):
    guard = Guard(nonfinite=nonfinite, on_spike=on_spike, spike=5.0, max_skips=2, max_rollbacks=1)
    facts = StepFacts(loss=NAN if is_bad else 1.0, spike="x" if is_spike and not is_bad else "", is_again=is_again,
                      skips_in_row=skips, rollbacks=rollbacks)  # fmt: skip
    reaction = decide(guard, facts)
    if not is_bad and not is_spike:
        assert reaction is Reaction.GO_ON
    if reaction is Reaction.SKIP:
        assert skips < 2
    if reaction is Reaction.ROLL_BACK:
        assert rollbacks < 1
        assert on_spike == "rollback"
    if is_bad:
        assert (reaction is Reaction.GO_ON) == (nonfinite == "ignore")
    elif is_spike:
        assert reaction is not Reaction.GO_ON


def test_what_the_record_counts():
    record = after_skip(after_skip(GuardRecord(), 5), 6)
    assert (record.num_skipped, record.skips_in_row, record.clean_since) == (2, 2, 7)
    record = after_update(record, 7, 1.0, None, 3)
    assert (record.num_skipped, record.skips_in_row) == (2, 0)
    back = after_rollback(record, GuardRecord(losses=(0.5,)), 9)
    assert (back.losses, back.num_skipped, back.rollbacks, back.clean_since) == ((0.5,), 2, 1, 10)
    for step in range(10, 12):
        back = after_update(back, step, 1.0, None, 3)
        assert back.rollbacks == 1
    assert after_update(back, 12, 1.0, None, 3).rollbacks == 0, "a window of sound steps"


def test_mistakes_in_a_guard_are_named(tmp_path):
    for fields in ({"on_spike": "panic"}, {"spike": 1.0}, {"spike": math.inf}, {"max_skips": -1}, {"window": 3}):
        with pytest.raises(ValueError, match="expected"):
            Guard(**fields)
    with pytest.raises(ValueError, match="'rollback', but the job has no saves"):
        make(guard=Guard(spike=5.0, on_spike="rollback"))


# -- skipping ---------------------------------------------------------------------------------------------------------


def test_a_skipped_step_changes_nothing_but_the_position(tmp_path):
    """Against a run that is stopped before the step, moved on by hand, and goes on."""

    def main(group):
        folder = tmp_path / f"logs{1 if group is None else group.size}"
        job = make(group, guard=Guard(nonfinite="skip"), log_dir=folder)
        outcomes = train(job, nan_at(BAD))
        job.close()
        return job.digest(), outcomes, job.guarding.record.num_skipped

    digest, outcomes, num_skipped = on_all_sizes(main)
    assert outcomes == [Outcome.APPLIED] * BAD + [Outcome.SKIPPED] + [Outcome.APPLIED] * (NUM_STEPS - BAD - 1)
    assert num_skipped == 1
    by_hand = make()
    train(by_hand, sound, max_steps=BAD)
    by_hand.schedule.sampler.commit(BAD)
    by_hand.scheduler.step()  # type: ignore[union-attr]
    train(by_hand, sound)
    assert by_hand.digest() == digest
    for size in SIZES:
        verdict = check_directory(tmp_path / f"logs{size}")
        assert verdict.problems == []
        samples = [index for slot in range(4) for index in make().schedule.sampler.indices(BAD, slot)]
        assert verdict.left_out == {BAD: samples}, "exactly these are in no weights"


def test_too_many_in_a_row_stop_the_job_and_a_sound_step_ends_a_row():
    def main(group):
        job = make(group, guard=Guard(nonfinite="skip", max_skips=2))
        with pytest.raises(NonFinite) as caught:
            train(job, nan_at(3, 4, 6, 7, 8))
        return caught.value.step, job.step, job.guarding.record.num_skipped

    assert on_all_sizes(main) == (8, 8, 4)


def test_a_spike_is_skipped_or_stops_the_job():
    def main(group):
        job = make(group, guard=Guard(spike=50.0))
        outcomes = train(job, spike_at(BAD))
        strict = make(group, guard=Guard(spike=50.0, on_spike="stop"))
        with pytest.raises(LossSpike, match=f"step {BAD} of epoch 0 is out of all proportion: the loss is") as caught:
            train(strict, spike_at(BAD))
        return job.digest(), outcomes[BAD], outcomes.count(Outcome.APPLIED), caught.value.step, strict.step

    found = on_all_sizes(main)
    assert found[1:] == (Outcome.SKIPPED, NUM_STEPS - 1, BAD, BAD)


def test_guards_that_find_nothing_leave_the_bits_alone():
    def main(group, guard):
        job = make(group, guard=guard)
        train(job, sound, max_steps=20)
        return job.digest()

    guards = (Guard(nonfinite="ignore"), Guard(), Guard(nonfinite="skip", spike=50.0))
    assert len({on_all_sizes(lambda group, guard=guard: main(group, guard)) for guard in guards}) == 1


# -- going back -------------------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    return sorted(step for path in list_saves(folder) if (step := step_of(path.name)) is not None)


def test_the_job_goes_back_to_the_last_good_save_and_leaves_the_samples_since_then_out(tmp_path):
    """Saves after 5, 10, 15 and 20 steps; the last is not known to be good when step 22 spikes."""

    def main(group):
        size = 1 if group is None else group.size
        saves = Saves(directory=tmp_path / f"saves{size}", every=5, keep=1)
        guard = Guard(spike=50.0, on_spike="rollback")
        job = make(group, guard=guard, saves=saves, log_dir=tmp_path / f"logs{size}")
        seen: dict[int, torch.Tensor] = {}

        def look(step):
            seen[step.number] = job.model[0].weight.detach().clone()

        outcomes = train(job, spike_at(BAD), before=look)
        assert torch.equal(seen[BAD + 1], seen[15]), "the weights are those after 15 steps"
        assert not torch.equal(seen[BAD], seen[15])
        job.close()
        return job.digest(), outcomes, job.guarding.record.rollbacks

    _, outcomes, rollbacks = on_all_sizes(main)
    assert outcomes == [Outcome.APPLIED] * BAD + [Outcome.SKIPPED] + [Outcome.APPLIED] * (NUM_STEPS - BAD - 1)
    assert rollbacks == 1
    sampler = make().schedule.sampler
    for size in SIZES:
        verdict = check_directory(tmp_path / f"logs{size}")
        assert verdict.problems == []
        assert verdict.left_out == {
            step: [index for slot in range(4) for index in sampler.indices(step, slot)] for step in range(15, BAD + 1)
        }
        told = [line for path in (tmp_path / f"logs{size}").glob("events-*") for line in read_lines(path)]
        backs = [line for line in told if line["event"] == "rolled_back"]
        assert [(line["step"], line["to"]) for line in backs] == [(BAD, 15)] * size
    # What was good stays outside of the rotation, which keeps one: after 30 steps, that of 25 is known to be good.
    assert steps_of(tmp_path / "saves1") == [25, 30]
    assert good_save(tmp_path / "saves1") == "step-000000000025"


def test_a_save_is_good_once_the_steps_after_it_were_sound(tmp_path):
    job = make(guard=Guard(nonfinite="skip", spike=50.0), saves=Saves(directory=tmp_path, every=2, keep=1))
    train(job, nan_at(5), max_steps=6)
    assert steps_of(tmp_path) == [2, 6], "4 was followed by a bad step: the last good one is 2"
    resumed = make(guard=Guard(nonfinite="skip", spike=50.0), saves=Saves(directory=tmp_path, every=2, keep=1))
    train(resumed, sound, max_steps=10)
    assert steps_of(tmp_path) == [8, 10]
    (tmp_path / GOOD).write_text("../elsewhere")
    assert good_save(tmp_path) == "", "a name that is no save's counts for nothing"


def test_going_back_again_and_again_ends_and_so_does_going_back_to_nothing(tmp_path):
    guard = Guard(spike=50.0, on_spike="rollback", max_rollbacks=2)
    job = make(guard=guard, saves=Saves(directory=tmp_path / "a", every=5))
    with pytest.raises(LossSpike, match="went back to the last good save 2 times already"):
        train(job, spike_at(22, 24, 26, 28))
    assert job.step == 26
    early = make(guard=guard, saves=Saves(directory=tmp_path / "b", every=100))
    with pytest.raises(LossSpike, match="no save to go back to"):
        train(early, spike_at(BAD))
    assert early.step == BAD


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", ["b", "c"])
def test_a_worker_that_is_lost_on_the_way_back_changes_nothing(tmp_path, monkeypatch, dies):
    """a sends the save to b, then to c. If c dies, b is through and a takes the step over; if b dies it comes again."""

    def explode(job, step):
        job.saving.wait_idle()  # a busy disk leaves saves out, and then the job goes back further
        if step.number == BAD and step.reduce():
            for param in job.params:
                param.grad.mul_(1000)

    def run(folder: Path, workers: str, dying: str = "") -> tuple[dict, list]:
        world = World(folder, monkeypatch)
        world.num_steps, world.saves = NUM_STEPS, Saves(directory=folder / "saves", every=5)
        world.guard = Guard(spike=100.0, on_spike="rollback")
        outcomes, is_through = [], threading.Event()

        def receive(group, source):
            if group.size == len(workers) and workers[group.rank] == dying:
                if dying != workers[1]:
                    assert is_through.wait(100), "b has its state before the generation ends"
                world.break_(0, dying)
                world.agree(1, *(worker for worker in workers if worker != dying))
                raise Die
            state = receive_state(group, source)
            is_through.set()
            return state

        def send(group, state, rank):
            if (
                group.size == len(workers) and workers[rank] == dying
            ):  # a small message would be taken by the network though nobody reads it
                world.keys.wait([broken_key(0)], 100.0)
                raise PeerLost(f"{dying} is gone")
            return send_state(group, state, rank)

        monkeypatch.setattr(_rollback, "receive_state", receive)
        monkeypatch.setattr(_rollback, "send_state", send)
        world.agree(0, *workers)
        for worker in workers:
            world.start(
                worker,
                on_step=explode,
                on_commit=lambda job, step, outcome: outcomes.append((job.worker_id, step.number, outcome)),
            )
        return world.join(), [(worker, outcome) for worker, step, outcome in outcomes if step == BAD]

    alone, outcomes = run(tmp_path / "alone", "a")
    assert outcomes == [("a", Outcome.SKIPPED)]
    results, outcomes = run(tmp_path / "three", "abc", dies)
    assert isinstance(results.pop(dies), Die)
    assert set(results.values()) == set(alone.values())
    if dies == "c":
        assert sorted(outcomes, key=str) == [("a", Outcome.ADOPTED), ("b", Outcome.SKIPPED)]
    else:
        assert sorted(outcomes, key=str) == [
            ("a", Outcome.DROPPED), ("a", Outcome.SKIPPED), ("c", Outcome.DROPPED), ("c", Outcome.SKIPPED)
        ]  # fmt: skip
    assert check_directory(tmp_path / "three").problems == []


# -- naming -----------------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """The identity, but for slot 3 of step 2."""

    def __init__(self, where: list[int], *, in_backward: bool = False) -> None:
        super().__init__()
        self.where, self.in_backward = where, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where != [2, 3]:
            return x
        if not self.in_backward:
            return x * NAN
        x = x.clone()
        x.register_hook(lambda grad: grad * NAN)
        return x


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (lambda where: [Breaks(where), nn.Linear(4, 3), nn.Linear(3, 1)], "the output of module 0"),
        (lambda where: [nn.Identity(), Breaks(where), nn.Linear(4, 1)], "the output of module 1"),
        (lambda where: [nn.Linear(4, 4), Breaks(where, in_backward=True), nn.Linear(4, 1)], "the gradient of 0."),
    ],
)
def test_the_first_module_or_parameter_that_is_not_finite_is_named_on_all_workers(layers, told):
    def main(group):
        where: list[int] = []
        model = nn.Sequential(*layers(where))
        with pytest.raises(NonFinite) as caught:
            train(make(group, model=model), sound, where=where)
        assert not any(module._forward_hooks for module in model.modules()), "hooks are gone"
        return str(caught.value), caught.value.step, list(caught.value.slots)

    alone = main(None)
    assert alone[1:] == (2, [3])
    assert f"the first that is not finite is {told}" in alone[0]
    results = simulate(2).run(main)
    assert results[0] == results[1]
    assert f"the first that is not finite is {told}" in results[0][0]


def test_a_loss_that_is_bad_though_the_model_is_not_and_samples_that_are_bad_themselves():
    with pytest.raises(NonFinite, match="the output of every module is finite: it begins in the loss"):
        train(make(), nan_at(4))
    model = nn.Linear(2, 1)
    trace = FirstNonFinite(model, is_finite)
    trace.install()
    model(torch.tensor([[NAN, 1.0]]))
    code = trace.take_code()
    assert (trace.name(code), trace.name(0), trace.take_code()) == ("the input of the model", "", 0)
    trace.remove()
    model(torch.tensor([[NAN, 1.0]]))
    assert trace.take_code() == 0


def test_an_error_that_the_loop_catches_leaves_the_step_out_on_all_workers(tmp_path):
    """As ``skip`` does, but the loop hears of it, with the words that would have stopped the job."""

    def main(group, nonfinite, log_dir=None):
        job = make(group, guard=Guard(nonfinite=nonfinite, max_skips=9), log_dir=log_dir)
        told = []
        for step in job.steps(max_steps=8):
            for micro in step:
                loss = (job.model(micro.batch) + 1.0).square().mean()
                micro.backward(nan_at(3, 5)(step, micro, loss))
            try:
                outcome = step.commit()
            except NonFinite as error:
                assert step.outcome is Outcome.SKIPPED
                told.append((error.step, *error.slots, "slot 1" in str(error)))
            else:
                told.append(outcome.value)
        return job.digest(), told

    digest, told = on_all_sizes(lambda group: main(group, "raise"))
    bad = [(3, 1, True), (5, 1, True)]
    dropped = ["applied"] * 3 + ["dropped", bad[0], "applied", "dropped", bad[1]] + ["applied"] * 2
    assert told == dropped
    assert digest == main(None, "skip", tmp_path)[0]
    with pytest.raises(NonFinite, match="step 3 of epoch 0 is not finite"):
        train(make(guard=Guard(nonfinite="raise")), nan_at(3))
