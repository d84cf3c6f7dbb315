"""A worker whose bits are wrong is found before the commit, named and parted with; the weights are right in the end."""

from __future__ import annotations

import re
import threading
import time

import pytest
import sharded_training
import torch
from elastic_training import make_job, train
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import World
from sharded_world import ShardedWorld
from torch.nn import functional as F

from log_lines import read_lines
from phalanx.comm import Group, simulate
from phalanx.elastic import NobodyDecides, RunOptions, VerifySlots
from phalanx.elastic._bit_digests import BLOCK, MessageDigests, digest_of
from phalanx.elastic._verify_slots import SlotCheck, StepDigests, WrongKind, judge, plan_check
from phalanx.elastic._verifying import locate_block
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint._stream import StateDamaged, receive_state, send_state
from phalanx.elastic.reduce._deal import even_deal, ranges_of
from phalanx.elastic.reduce._flat_layout import FlatLayout
from phalanx.elastic.reduce._waves import even_waves
from phalanx.errors import PeerLost, WrongBits

THREE = ranges_of(even_deal(8, 3))


# ---- decisions


@pytest.mark.fast
@given(size=st.integers(1, 9), step=st.integers(0, 500), every=st.integers(1, 7), seed=st.integers(0, 9))
def test_a_check_names_three_workers_and_comes_when_it_is_due(size, step, every, seed):
    ranges = ranges_of(even_deal(9, size))
    check = plan_check(VerifySlots(every=every), seed, step, ranges)
    assert (check is None) == (size == 1 or (step + 1) % every != 0)
    if check is not None:
        assert check.slot in ranges[check.first]
        named = [check.first, check.second, check.third][: min(size, 3)]
        assert len(set(named)) == len(named)
        assert all(0 <= rank < size for rank in named)
        assert size > 2 or check.third == -1
    assert plan_check(None, seed, step, ranges) is None


@pytest.mark.fast
def test_every_slot_and_every_second_worker_comes_up():
    checks = [plan_check(VerifySlots(every=1), 0, step, THREE) for step in range(200)]
    assert {check.slot for check in checks} == set(range(8))
    assert {(check.first, check.second) for check in checks} == {(a, b) for a in range(3) for b in range(3) if a != b}
    with pytest.raises(ValueError, match="every is 0"):
        VerifySlots(every=0)


CHECK = SlotCheck(slot=4, first=0, second=1, third=2)


@pytest.mark.fast
def test_who_is_wrong():
    same = StepDigests(weights="w", total="t")
    assert judge(CHECK, [same] * 3) is None
    for slots, is_trial, expected in (
        ("aa-", False, None),
        ("ab-", False, (0, False)),
        ("aba", True, (1, True)),
        ("abb", True, (0, True)),
        ("abc", True, (0, False)),
    ):
        found = [StepDigests(weights="w", total="t", slot=slot) for slot in slots]
        wrong = judge(CHECK, found, is_trial=is_trial)
        assert (wrong and (wrong.odd, wrong.is_known)) == expected, slots
    other = StepDigests(weights="w", total="x")
    wrong = judge(CHECK, [other, same, same])
    assert (wrong.kind, wrong.odd, wrong.right, wrong.is_known) == (WrongKind.SUM, 0, 1, True)
    assert not judge(SlotCheck(slot=0, first=0, second=1), [other, same]).is_known
    sender = StepDigests(sent=[[], ["b", "c"]], received=[[], []])
    receiver = StepDigests(sent=[[], []], received=[["b", "x"], []])
    wrong = judge(SlotCheck(slot=0, first=0, second=1), [sender, receiver])
    assert (wrong.kind, wrong.odd, wrong.right, wrong.block) == (WrongKind.MESSAGE, 1, 0, 1)


@pytest.mark.fast
def test_a_block_of_a_message_is_found_in_its_parameter():
    layout = FlatLayout.of([torch.zeros(3 * BLOCK), torch.zeros(5)], [], 8)
    messages = MessageDigests(2)
    chunk = layout.chunk(layout.buckets[0], 2)
    sent = torch.zeros(2 * chunk)  # two pieces
    messages.sent([torch.empty(0), sent], rank=0)
    sent[chunk + BLOCK] = 1.0
    messages.received([torch.empty(0), sent], rank=0)
    block = next(i for i, (a, b) in enumerate(zip(messages.of_sent[1], messages.of_received[1], strict=True)) if a != b)
    bucket, at = locate_block(layout, 2, 1, block, 2)
    assert bucket is layout.buckets[0]
    assert 0 <= chunk + BLOCK - at <= BLOCK
    assert digest_of(None) != digest_of(torch.zeros(0))


# ---- jobs


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the third element."""
    tensor.detach().reshape(-1)[2:3].view(torch.int32).bitwise_xor_(1)


def wrong_gradient(job, step):
    """In the slot that is checked, on who carries it, once; what is added to the others' is as wrong."""
    computed = job.verifying.computed

    def take(slot, grads, sums):
        if job.step == step and slot == job.verifying._check.slot:
            flip(grads[1])
        computed(slot, grads, sums)

    job.verifying.computed = take


def wrong_weights(job, step):
    flip(job.model[2].weight)


def wrong_message(job, step):
    group = job.regrouping.membership.group
    real = group.all_to_all

    def all_to_all(outputs, inputs, **keywords):
        work = real(outputs, inputs, **keywords)
        work.wait()  # else what comes would be written over it, now and then
        flip(next(output for rank, output in enumerate(outputs) if rank != group.rank and output.numel()))
        return work

    group.all_to_all = all_to_all


def wrong_sum(job, step):
    group = job.regrouping.membership.group
    real = group.all_gather_into_tensor

    def all_gather_into_tensor(output, *args, **keywords):
        work = real(output, *args, **keywords)
        if output.dtype == torch.float32:
            flip(output)
        return work

    group.all_gather_into_tensor = all_gather_into_tensor


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        world = World(tmp_path_factory.mktemp("undisturbed"), patch)
        world.agree(0, "x")
        world.start("x")
        return world.join()["x"]


@pytest.mark.parametrize(
    ("hurt", "what", "parameter"),
    [
        (wrong_gradient, "slot", "0.bias"),
        (wrong_weights, "weights", "2.weight"),
        (wrong_message, "message", "0.weight"),
        (wrong_sum, "sum", "0.weight"),
    ],
)
def test_a_wrong_worker_is_named_and_the_others_end_with_the_right_bits(
    tmp_path, monkeypatch, undisturbed, hurt, what, parameter
):
    world = World(tmp_path, monkeypatch)
    world.verify_slots = VerifySlots(every=1)
    workers = ("a", "b", "c")
    bad = next(s for s in range(2, 15) if plan_check(world.verify_slots, 0, s, THREE).first == 1)

    def on_commit(job, step, outcome):
        if step.number == bad - 1 and outcome:
            hurt(job, bad)

    world.agree(0, *workers)
    for worker in workers:
        world.start(worker, on_commit=on_commit if worker == "b" else lambda *args: None)
    deadline = time.monotonic() + 150
    while "b" not in world.results and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(world.results.get("b"), WrongBits), world.results
    world.break_(0, "b")
    world.agree(1, "a", "c")
    results = world.join()
    assert results["a"] == results["c"] == undisturbed
    (event,) = [e for p in tmp_path.glob("events-*") for e in read_lines(p) if e["event"] == "wrong_bits"]
    assert (event["step"], event["what"], event["culprit"]) == (bad, what, "b")
    assert event["parameter"] == parameter, str(results["b"])
    if what in ("slot", "weights", "sum"):
        assert event["element"] == 2
        assert len(set(event["values"])) == 2
    assert f"step {bad}: worker b" in str(results["b"])


def verified(group, every, **options):
    job = make_job(
        length=260,
        verify_slots=every and VerifySlots(every=every),
        run=RunOptions(progress=False, group=group, **options),
    )
    extra = []
    losses = []
    for step in job.steps(epochs=1):
        for micro in step:
            extra.append(micro.is_extra)
            micro.log("slot", float(micro.slot))  # of an extra one it does not count
            micro.backward(job.model(micro.inputs).square().mean())
        step.commit(max_grad_norm=1.0)
        losses.append(step.loss)
    return job.digest(), sum(extra), losses


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_checking_changes_no_bit_and_computes_one_slot_more(options):
    expected, _, losses = verified(None, None)
    for size in (2, 5):
        results = simulate(size).run(verified, 2, **options)
        assert {digest for digest, _, _ in results} == {expected}
        assert sum(count for _, count, _ in results) == len(losses) // 2
        assert results[0][2] == losses


def test_two_workers_that_differ_stop_the_job():
    def run(group):
        job = make_job(verify_slots=VerifySlots(every=1), run=RunOptions(progress=False, group=group))
        computed = job.verifying.computed

        def take(slot, grads, sums):
            if job.rank == 1:
                flip(next(grad for grad in grads if grad is not None))
            computed(slot, grads, sums)

        job.verifying.computed = take
        with pytest.raises(
            NobodyDecides, match=r"workers rank\d and rank\d differ in the slot \d: inner.*cannot be said who is wrong"
        ):
            train(job, max_steps=1)
        return job.step

    assert simulate(2).run(run) == [0, 0]


def test_a_fixed_group_raises():
    def run(group):
        job = make_job(verify_slots=VerifySlots(every=1), run=RunOptions(progress=False, group=group))
        if group.rank == 2:
            flip_later(job)
        try:
            train(job, max_steps=3)
        except (WrongBits, PeerLost) as error:
            return type(error).__name__, job.step
        return "", job.step

    def flip_later(job):
        begin = job.verifying.begin_step

        def begin_step():
            if job.step == 1:
                flip(job.model.extra)
            begin()

        job.verifying.begin_step = begin_step

    assert simulate(3).run(run) == [("PeerLost", 1), ("PeerLost", 1), ("WrongBits", 1)]


# ---- sharded jobs


def wrong_sharded_gradient(job, step):
    """In the slot that is checked, on who carries it, once."""
    names, reduction = next(one for one in job.sharding.reductions() if "first.bias" in one[0])

    def add(group, index, grad, real=reduction.add):
        if job.step == step and reduction.watch is not None and names[index] == "first.bias":
            flip(grad)
        real(group, index, grad)

    reduction.add = add


@pytest.fixture(scope="module")
def undisturbed_sharded() -> str:
    job = sharded_training.make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    sharded_training.train(job)
    return sharded_training.weights(job)


def wrong_sharded_weights(job, step):
    flip(next(p.tensor for p in job.sharding.store.pieces if job.sharding.name_of(p.key) == "middle.0.weight"))


def wrong_buffer(job, step):
    flip(job.model.drift)


@pytest.mark.parametrize(
    ("hurt", "what", "parameter", "element"),
    [
        (wrong_sharded_gradient, "slot", "first.bias", 0),
        (wrong_message, "message", "gradients of middle.0.weight, .*", -1),
        (wrong_sharded_weights, "weights", "middle.0.weight", 0),
        (wrong_buffer, "weights", "drift", 2),
    ],
)
def test_a_wrong_worker_of_a_sharded_job_is_named_and_the_others_end_with_the_right_bits(
    tmp_path, monkeypatch, undisturbed_sharded, hurt, what, parameter, element
):
    world = ShardedWorld(tmp_path, monkeypatch)
    world.verify_slots, world.copies = VerifySlots(every=1), 3
    slots = [even_waves(8, 3).slots_of(rank) for rank in range(3)]
    bad = next(s for s in range(2, 8) if plan_check(world.verify_slots, 0, s, slots).first == 1)

    def on_commit(job, step, outcome):
        if step.number == bad - 1 and outcome:
            hurt(job, bad)

    world.agree(0, *"abc")
    for worker in "abc":
        world.start(worker, on_commit=on_commit if worker == "b" else lambda *args: None)
    wait_until(lambda: "b" in world.results)
    assert isinstance(world.results["b"], WrongBits), world.results
    world.break_(0, "b")
    world.agree(1, "a", "c")
    results = world.join()
    assert results["a"] == results["c"] == undisturbed_sharded
    (event,) = [e for p in tmp_path.glob("events-*") for e in read_lines(p) if e["event"] == "wrong_bits"]
    assert (event["step"], event["what"], event["culprit"]) == (bad, what, "b")
    assert re.fullmatch(parameter, event["parameter"]), event
    assert event["element"] == element
    assert len(set(event.get("values", ()))) == (2 if parameter == "drift" else 0)
    verdict = check_directory(tmp_path)
    assert (verdict.problems, verdict.num_steps) == ([], 8)


@pytest.mark.parametrize("copies", [1, 2])
def test_of_two_copies_nobody_can_say_which_is_wrong_and_one_alone_is_not_looked_at(copies):
    def run(group):
        job = sharded_training.make_job(
            group=group, copies=copies, verify_slots=VerifySlots(every=2), is_random=False, kind="sgd"
        )
        for step in job.steps(max_steps=2):
            for micro in step:
                micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
            step.commit()
            if step.number == 0 and group.rank == 1:
                flip(job.sharding.store.pieces[0].tensor)
        return job.step

    if copies == 1:
        assert simulate(3).run(run) == [2] * 3
        return
    with pytest.raises(
        Exception, match=r"step 1: workers rank\d and rank\d differ in the weights: \S+ differs at"
    ) as e:
        simulate(3).run(run)
    assert isinstance(e.value.__cause__, NobodyDecides)
    assert "of three copies or more (Job(copies=3)) most decide. Nothing of the step was applied" in str(e.value)


def verified_sharded(group, every):
    options = every and VerifySlots(every=every)
    job = sharded_training.make_job(group=group, copies=2, verify_slots=options, parts=2)
    extra, told = 0, []
    for step in job.steps(max_steps=4):
        for micro in step:
            extra += micro.is_extra
            micro.backward(F.cross_entropy(job.model(micro.inputs), micro.targets))
        step.commit(max_grad_norm=0.5)
        job.count.update(job.model)
        told.append((step.loss, step.grad_norm, step.num_samples))
    return told, sharded_training.weights(job), extra


def test_checking_changes_no_bit_of_a_sharded_job():
    expected = simulate(1).run(verified_sharded, None)[0]
    results = simulate(3).run(verified_sharded, 2)
    assert [found[:2] for found in results] == [expected[:2]] * 3
    assert sum(count for _, _, count in results) == 2 * 2, "two steps, whose slot has two parts"


def test_a_state_that_is_changed_on_its_way_is_refused():
    def run(group, hurt):
        if group.rank == 0:
            real = group.send

            def send(tensor, dst):
                if hurt and tensor.numel() == 4000:
                    tensor = tensor.clone()
                    tensor[7] ^= 1
                real(tensor, dst)

            group.send = send
            send_state(group, {"weight": torch.arange(1000.0), "epoch": 3}, 1)
            return None
        return receive_state(group, 0)

    state = simulate(2).run(run, False)[1]
    assert state["epoch"] == 3
    assert torch.equal(state["weight"], torch.arange(1000.0))
    with pytest.raises(Exception, match=r"did not come as it was: of 1 tensors, number 0 \(torch.float32") as caught:
        simulate(2).run(run, True)
    assert isinstance(caught.value.__cause__, StateDamaged)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.01)


def test_a_newcomer_whose_state_is_changed_on_its_way_ends_and_the_others_go_on(tmp_path, monkeypatch, undisturbed):
    world = World(tmp_path, monkeypatch)
    real, blocks = Group.recv, []

    def recv(group, tensor, src, *args, **keywords):
        found = real(group, tensor, src, *args, **keywords)
        if threading.current_thread() is world.threads[-1] and tensor.dtype is torch.uint8 and len(world.threads) == 3:
            blocks.append(tensor)
            if len(blocks) == 2:  # behind the header
                tensor[7] ^= 1
        return found

    monkeypatch.setattr(Group, "recv", recv)

    def on_step(job, step):
        if step.number == 4 and job.worker_id == "a" and len(world.threads) == 2:
            world.break_(0)
            world.agree(1, "a", "b", "new")
            world.start("new", 1)
            wait_until(lambda: job.regrouping.coordinator.signals.broken is not None)
        if step.number == 6 and job.worker_id == "a" and "new" not in world.results:
            wait_until(lambda: job.regrouping.coordinator.signals.wish)

    world.agree(0, "a", "b")
    for worker in "ab":
        world.start(worker, on_step=on_step)
    wait_until(lambda: "new" in world.results)
    world.break_(1, "new")
    world.agree(2, "a", "b")
    results = world.join()
    assert isinstance(results["new"], StateDamaged), results["new"]
    assert "did not come as it was" in str(results["new"])
    assert results["a"] == results["b"] == undisturbed
