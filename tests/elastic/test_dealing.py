"""Slots follow speed: pure properties of a deal, and jobs whose slots move while their bits stay."""

from __future__ import annotations

import itertools

import pytest
from elastic_training import make_job, train
from hypothesis import given
from hypothesis import strategies as st

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import RunOptions
from phalanx.elastic._dealing import MAX_SETTLE, WINDOW, known_pace
from phalanx.elastic.reduce._deal import MIN_GAIN, better_deal, deal, even_deal, ranges_of, span

SECONDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@pytest.mark.fast
@given(num_slots=st.integers(1, 200), seconds=SECONDS)
def test_every_slot_is_dealt_once_and_nobody_starves(num_slots, seconds):
    sizes = deal(num_slots, seconds)
    assert [slot for slots in ranges_of(sizes) for slot in slots] == list(range(num_slots))
    if num_slots >= len(seconds):
        assert min(sizes) >= 1
    else:
        assert sizes == even_deal(num_slots, len(seconds))


@pytest.mark.fast
@given(num_slots=st.integers(12, 200), seconds=SECONDS, data=st.data())
def test_more_speed_is_never_fewer_slots(num_slots, seconds, data):
    sizes = deal(num_slots, seconds)
    for (a, n), (b, m) in itertools.permutations(zip(seconds, sizes, strict=True), 2):
        assert a >= b or n >= m, "who is faster than another has at least as many"
    rank = data.draw(st.integers(0, len(seconds) - 1))
    faster = [one * 0.7 if r == rank else one for r, one in enumerate(seconds)]
    assert deal(num_slots, faster)[rank] >= sizes[rank]


@pytest.mark.fast
@given(num_slots=st.integers(3, 9), seconds=st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_deal_is_the_best_of_all(num_slots, seconds):
    everything = [c for c in itertools.product(range(1, num_slots), repeat=3) if sum(c) == num_slots]
    assert span(deal(num_slots, seconds), seconds) == min(span(one, seconds) for one in everything)


@pytest.mark.fast
@given(num_slots=st.integers(1, 200), seconds=SECONDS)
def test_a_deal_is_left_alone_once_it_is_good(num_slots, seconds):
    sizes = even_deal(num_slots, len(seconds))
    found = better_deal(sizes, seconds)
    if found is None:
        assert (
            num_slots < len(seconds)
            or span(deal(num_slots, seconds), seconds) > (1 - MIN_GAIN) * span(sizes, seconds) * (1 - 1e-9)
            or span(sizes, seconds) < 1
        )
    else:
        assert better_deal(found, seconds) is None
        assert span(found, seconds) <= (1 - MIN_GAIN) * span(sizes, seconds)
    assert better_deal(sizes, [1.0] * len(seconds)) is None, "nobody is slow"


@pytest.mark.fast
def test_short_steps_are_left_alone_and_nonsense_is_refused():
    assert better_deal((4, 4), [1e-5, 9e-5]) is None
    with pytest.raises(ValueError, match="seconds per slot are"):
        deal(4, [1.0, 0.0])
    assert known_pace(["a", "b"], {"c": 1.0}) == []


def slowed(group, slow, tmp_path, *, balance=True, max_steps=WINDOW + 3, **options):
    """Train while slots on worker ``slow(step)`` are measured to take twice as long; what each step's slots were."""
    job = make_job(
        length=2000,
        run=RunOptions(progress=False, group=group, balance=balance, log_dir=tmp_path, verify=True, **options),
    )
    job.clock.end_slot = lambda: (0.2 if job.rank == slow(job.step) else 0.1, 0.0)
    sizes = []
    for step in job.steps(max_steps=max_steps):
        sizes.append(job.regrouping.reduction.sizes)
        for micro in step:
            micro.backward(job.model(micro.inputs).square().mean())
        step.commit(max_grad_norm=1.0)
    return sizes, job.digest()


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_a_slow_worker_gets_fewer_slots_and_the_bits_stay(tmp_path, options):
    (_, alone), *_ = simulate(1).run(slowed, lambda step: 0, tmp_path / "alone")
    results = simulate(3).run(slowed, lambda step: 1, tmp_path / "three", **options)
    assert {digest for _, digest in results} == {alone}
    for sizes, _ in results:
        assert sizes[: WINDOW - 1] == [(2, 3, 3)] * (WINDOW - 1)
        assert sizes[-1] == (3, 2, 3), "decided by all alike"
    lines = [line for path in (tmp_path / "three").glob("events-*") for line in read_lines(path)]
    (event,) = [line for line in lines if line["event"] == "slots_dealt"]
    assert (event["sizes"], event["step"], event["pace"]) == ([3, 2, 3], WINDOW, [0.1, 0.2, 0.1])
    assert event["gain"] == 1.5


def test_slots_are_not_moved_when_nobody_is_slow_or_it_is_switched_off(tmp_path):
    for balance, slow in ((True, -1), (False, 1)):
        for sizes, _ in simulate(2).run(slowed, lambda step, slow=slow: slow, tmp_path, balance=balance):
            assert set(sizes) == {(4, 4)}


def test_a_worker_that_is_slow_by_turns_moves_slots_ever_more_rarely(tmp_path):
    """Each deal of a round doubles the steps until the next."""
    steps = 5 * WINDOW + 2
    for sizes, _ in simulate(2).run(slowed, lambda step: int(step // 4 % 5 < 3), tmp_path, max_steps=steps):
        changes = [i for i in range(1, steps) if sizes[i] != sizes[i - 1]]
        assert len(changes) <= 3
        assert all(b - a >= 2 * WINDOW for a, b in itertools.pairwise(changes))
    assert MAX_SETTLE >= 4 * WINDOW


def test_a_recovered_worker_gets_its_slots_back(tmp_path):
    for sizes, _ in simulate(2).run(slowed, lambda step: 0 if step < WINDOW else -1, tmp_path, max_steps=4 * WINDOW):
        assert (3, 5) in sizes
        assert sizes[-1] == (4, 4)


def test_workers_must_agree_on_balancing():
    def run(group):
        job = make_job(run=RunOptions(progress=False, group=group, balance=group.rank == 0))
        train(job, max_steps=1)

    with pytest.raises(Exception, match="balance is True on worker"):
        simulate(2).run(run)
