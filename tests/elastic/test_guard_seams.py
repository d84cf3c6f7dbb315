"""Where a guard meets other parts of a job: scalers, accumulation, weights of all sizes, hooks of the user's own."""

from __future__ import annotations

import math

import pytest
import torch
from elastic_training import Kink
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from log_lines import read_lines
from phalanx.comm import observe, simulate
from phalanx.elastic import DataOptions, Guard, Job, NonFinite, Outcome, RunOptions
from phalanx.elastic._guarding import are_finite, is_finite
from phalanx.elastic.reduce._divide import can_look, divide

pytestmark = pytest.mark.fast

NAN, INF = math.nan, math.inf
BAD, NUM_STEPS = 2, 5


FAULTS = {
    "nan": lambda loss: loss * NAN,
    "only the loss": lambda loss: loss + INF,
    "only the gradient": lambda loss: Kink.apply(loss, INF),
}


def make(group=None, *, num_slots=4, **keywords) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = RunOptions(progress=False, group=group, threads=1, **keywords.pop("run", {}))
    rows = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    return Job(model, optimizer, rows, num_slots=num_slots, slot_batch_size=4, run=run, **keywords)


def train(job, fault=None, *, bad=(BAD,), slot=1, part=0, max_steps=NUM_STEPS, between=None):
    """What became of each step, and the weights' digest at the end."""
    outcomes = []
    for step in job.steps(max_steps=max_steps):
        for micro in step:
            loss = (job.model(micro.batch) + 1.0).square().mean()
            spoils = fault is not None and (micro.slot, micro.part) == (slot, part) and step.number in bad
            micro.backward(FAULTS[fault](loss) if spoils else loss)
        if between is not None:
            between(step)
        outcomes.append(step.commit())
    return outcomes, job.digest()


LEFT_OUT = [Outcome.SKIPPED if number == BAD else Outcome.APPLIED for number in range(NUM_STEPS)]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("num_slots", "parts"), [(4, 1), (6, 1), (4, 2), (1, 1)])
def test_a_fault_of_one_slot_is_seen_by_all_whatever_the_weight(fault, num_slots, parts):
    """The weight of a step is the number of slots: gradients are looked at on the way only by some of them."""

    def run(group):
        job = make(group, num_slots=num_slots, data=DataOptions(parts=parts), guard=Guard(nonfinite="skip"))
        return train(job, fault, slot=num_slots - 1, part=parts - 1)

    alone = run(None)
    assert alone[0] == LEFT_OUT
    if num_slots > 1:
        assert simulate(3).run(run) == [alone] * 3


@pytest.mark.parametrize("fault", FAULTS)
def test_gradients_that_were_sent_while_they_came_are_looked_at_as_well(fault):
    results = simulate(2).run(
        lambda group: train(make(group, run={"overlap": True}, guard=Guard(nonfinite="skip")), fault, slot=3)
    )
    assert [outcomes for outcomes, _ in results] == [LEFT_OUT] * 2
    assert {digest for _, digest in results} == {train(make(guard=Guard(nonfinite="skip")), fault, slot=3)[1]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_scaler_and_a_guard_that_skips_leave_the_same_step_out_once(fault):
    """What is wrong with a gradient is the scaler's business, and no skip; a loss alone is the guard's."""

    def run(group):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        job = make(group, scaler=scaler, guard=Guard(nonfinite="skip", max_skips=0 if fault != "only the loss" else 1))
        outcomes, digest = train(job, fault)
        return outcomes, digest, scaler.get_scale(), job.guarding.record.num_skipped

    outcomes, digest, scale, num_skipped = run(None)
    if fault == "only the loss":
        assert (outcomes, scale, num_skipped) == (LEFT_OUT, 2.0**10, 1)
    else:
        assert (outcomes, scale, num_skipped) == ([Outcome.APPLIED] * NUM_STEPS, 2.0**9, 0)
    assert simulate(3).run(run) == [(outcomes, digest, scale, num_skipped)] * 3


def test_a_spike_in_the_first_steps_is_no_spike_since_there_is_nothing_to_compare_it_with():
    def run(group):
        job = make(group, guard=Guard(spike=5))
        outcomes = []
        for step in job.steps(max_steps=24):
            for micro in step:
                loss = (job.model(micro.batch) + 1.0).square().mean()
                micro.backward(loss + 1000 if step.number in (0, 1, 20) else loss)
            outcomes.append(step.commit())
        return outcomes, job.digest()

    outcomes, digest = run(None)
    assert [number for number, one in enumerate(outcomes) if one is Outcome.SKIPPED] == [20]
    assert simulate(2).run(run) == [(outcomes, digest)] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_what_the_loop_does_to_reduced_gradients_counts_even_if_they_were_looked_at(unscales):
    """In place, behind autograd's back: nobody is told of it."""

    def spoil(step):
        assert step.unscale() if unscales else step.reduce()
        if step.number == BAD:
            step.job.params[0].grad.data[0, 0] = NAN

    def mend(step):
        assert step.reduce()
        for param in step.job.params:
            param.grad.data.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    scaler = {"scaler": torch.amp.GradScaler("cpu", enabled=False)} if unscales else {}
    outcomes, _ = train(make(guard=Guard(nonfinite="skip"), **scaler), between=spoil)
    assert outcomes == LEFT_OUT
    with pytest.raises(NonFinite, match=r"the gradient of 0\.weight has nan"):
        train(make(**scaler), between=spoil)
    outcomes, _ = train(make(), "only the gradient", between=mend)
    assert outcomes == [Outcome.APPLIED] * NUM_STEPS


@pytest.mark.parametrize("size", [None, 2])
def test_a_guard_costs_no_bit_and_no_collective_with_weights_of_any_size(size):
    for num_slots in (4, 6):
        found = []
        for guard in (Guard(), Guard(nonfinite="ignore"), Guard(nonfinite="skip", spike=50)):
            told: list[str] = []

            def run(group, guard=guard, num_slots=num_slots):
                return train(make(group, num_slots=num_slots, guard=guard))

            with observe(lambda event, told=told: told.append(event.name) if event.group.rank == 0 else None):
                _, digest = run(None) if size is None else simulate(size).run(run)[0]
            found.append((digest, told))
        assert found[0] == found[1] == found[2]
        assert found[0][1].count("all_to_all") == (0 if size is None else NUM_STEPS)


def test_nobody_looks_where_nobody_wants_to_know():
    flat = torch.tensor([4.0, INF])
    assert divide([flat], 4.0, looks=False) is None
    assert flat.tolist() == [1.0, INF]


def test_two_reactions_to_one_job_are_told_in_order_with_step_and_reason(tmp_path):
    job = make(run={"log_dir": tmp_path}, guard=Guard(nonfinite="skip", max_skips=1))
    with pytest.raises(NonFinite):
        train(job, "nan", bad=(2, 3))
    (path,) = tmp_path.glob("events-*")
    told = [line for line in read_lines(path) if line["event"] in ("skipped", "nonfinite")]
    assert [(line["event"], line["step"]) for line in told] == [("skipped", 2), ("nonfinite", 3), ("nonfinite", 3)]
    assert [line.get("reaction") for line in told] == [None, "compute again", "stop"]


# -- dividing and looking ----------------------------------------------------------------------------------------------

VALUES = st.lists(
    st.one_of(
        st.floats(width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38, INF, -INF, NAN]),
    ),
    min_size=1,
    max_size=40,
)


@given(VALUES, st.integers(0, 12), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
@example([1e-45, 3e-45], 1, torch.float32)
def test_a_power_of_two_divides_to_the_bit_and_tells_what_is_finite(values, exponent, dtype):
    weight, flat = 2.0**exponent, torch.tensor(values, dtype=torch.float64).to(dtype)
    wanted, was_finite = flat / weight, is_finite(flat)
    assert divide([flat], weight) is was_finite
    assert torch.equal(flat.nan_to_num(), wanted.nan_to_num())
    assert torch.equal(flat.isnan(), wanted.isnan())
    assert torch.equal(flat.signbit() & ~flat.isnan(), wanted.signbit() & ~wanted.isnan())


@given(VALUES, st.floats(2**-10, 1e6))
def test_any_other_weight_divides_and_says_that_nobody_has_looked(values, weight):
    flat = torch.tensor(values, dtype=torch.float32)
    wanted, knows = flat / weight, can_look([flat], weight)
    found = divide([flat], weight)
    assert torch.equal(flat.nan_to_num(), wanted.nan_to_num())
    assert (found is None) is not knows
    if weight < 1:
        assert found is None, "what is finite may be infinite afterwards"


def test_gradients_without_such_a_kernel_are_divided_all_the_same():
    flat = torch.tensor([4 + 2j, 8 + 0j])
    assert divide([flat], 2.0) is None
    assert flat.tolist() == [2 + 1j, 4 + 0j]
    assert divide([], 2.0) is None


@given(st.lists(st.tuples(VALUES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), max_size=5))
def test_many_tensors_are_finite_together_if_each_is(lists):
    tensors = [torch.tensor(values, dtype=torch.float64).to(dtype) for values, dtype in lists]
    assert are_finite([torch.ones(3, dtype=torch.int64), *tensors]) is all(map(is_finite, tensors))
