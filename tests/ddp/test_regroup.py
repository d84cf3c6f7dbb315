"""Losing a peer inside backward, and going on in another group."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch

from ddp import cases
from ddp.naive import NaiveDataParallel
from phalanx.comm import simulate
from phalanx.comm.faults import kill_at, play
from phalanx.ddp import DistributedDataParallel
from phalanx.errors import PeerLost
from processes import run_processes


def _step(model, rank, step):
    cases.loss_of(model(cases.batch(step, rank))).backward()


@pytest.mark.fast
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("before", ["none", "accumulated"])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("warm", [0, 4])  # whether the failed step is the one that learns the order
def test_gradients_are_as_before_the_failed_step_and_training_goes_on(view, before, at, warm):
    def main(group):
        survivors = group.subgroup([0, 1]) if group.rank < 2 else None
        model = DistributedDataParallel(cases.make(cases.Mlp), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
        for step in range(warm):
            model.zero_grad()
            _step(model, group.rank, step)
        model.zero_grad()
        if before == "accumulated":
            with model.no_sync():
                _step(model, group.rank, 7)
        kept = cases.gradients(model.module)
        with play(kill_at(rank=2, step=at, name="all_reduce")):
            if group.rank == 2:
                _step(model, group.rank, 8)
                raise AssertionError("the script kills this rank before it gets here")
            with pytest.raises(PeerLost):
                _step(model, group.rank, 8)
        after = cases.gradients(model.module)
        for name, grad in kept.items():
            assert (grad is None) == (after[name] is None), name
            assert grad is None or torch.equal(grad, after[name]), name
        model._check_reducer_finalized()
        model.regroup(survivors)
        twin = cases.make(cases.Mlp)
        twin.load_state_dict(model.module.state_dict())
        reference = NaiveDataParallel(twin, survivors)
        for name, param in twin.named_parameters():
            param.grad = None if kept[name] is None else kept[name].clone()
        for step in range(8, 13):
            _step(model, group.rank, step)
            _step(reference, group.rank, step)
            reference.reduce_gradients()
            cases.assert_same(model.module, reference.module, f"step {step}")
            model.zero_grad()
            reference.zero_grad()

    simulate(3).run(main)


def _hear_buckets(model, hear):
    """Call ``hear(index, flat)`` before each bucket is launched, until ``launch`` is deleted from the exchange."""
    exchange = model.reducer.exchange
    launch = exchange.launch

    def heard(plan, current, metadata):
        hear(current.next_launch, current.buffers[current.next_launch].grads)
        launch(plan, current, metadata)

    exchange.launch = heard


def _lose_a_peer(worker, backend):
    group = worker.group(backend=backend, timeout=120.0)
    model = DistributedDataParallel(cases.make(cases.Mlp), process_group=group, bucket_cap_mb=0.02)
    for step in range(4):
        model.zero_grad()
        _step(model, group.rank, step)
    model.zero_grad()
    loss = cases.loss_of(model(cases.batch(4, group.rank)))
    if worker.rank == 2:
        _hear_buckets(model, lambda index, flat: os.kill(os.getpid(), signal.SIGKILL) if index else None)
    try:
        loss.backward()
        raise AssertionError("backward ended although a peer died in it")
    except PeerLost:
        pass
    assert all(param.grad is None for param in model.parameters())
    second = worker.group(backend=backend, generation=1, size=2, timeout=120.0)
    model.regroup(second)
    group.close()
    reference = NaiveDataParallel(cases.make(cases.Mlp), second)
    reference.module.load_state_dict(model.module.state_dict())
    for step in range(4, 8):
        for twin in (model, reference):
            twin.zero_grad()
            _step(twin, second.rank, step)
        reference.reduce_gradients()
        cases.assert_same(model.module, reference.module, f"step {step}")
    second.close()
    return "went on"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_a_killed_process_surfaces_as_peer_lost_and_survivors_go_on(backend):
    outcomes = run_processes(3, _lose_a_peer, backend, timeout=200.0)
    assert [outcome.value for outcome in outcomes] == ["went on", "went on", None]
    assert outcomes[2].exit_code == -signal.SIGKILL


@pytest.mark.fast
def test_regrouping_loses_no_memory():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp))
        plans, memory = [], []
        for one in [group.subgroup([0, 1]) for _ in range(4)]:
            model.regroup(one)
            for step in range(4):
                model.zero_grad()
                _step(model, group.rank, step)
                plans.append(weakref.ref(model.reducer.plan))
                buffers = [pool.writable(()) for pool in model.reducer.plan.pools]
                memory.append([weakref.ref(buffer.flat.untyped_storage()) for buffer in buffers])
                del buffers
            model.zero_grad()
            # All ranks have left the collectives of the groups before this one: they met in this one since.
            gc.collect()
            assert {id(plan()) for plan in plans if plan() is not None} == {id(model.reducer.plan)}
            alive = [step for step, storages in enumerate(memory) if any(ref() is not None for ref in storages)]
            assert not alive or min(alive) > len(memory) - 4, "buckets of an earlier group are still there"

    simulate(2).run(main)


@pytest.mark.fast
@pytest.mark.parametrize("view", [False, True])
def test_the_buckets_of_a_failed_step_are_given_back(view):
    def main(group):
        survivors = group.subgroup([0, 1]) if group.rank < 2 else None
        model = DistributedDataParallel(cases.make(cases.Mlp), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
        memory = []
        for step in range(3):
            model.zero_grad()
            if step == 2:
                _hear_buckets(model, lambda index, flat: memory.append(weakref.ref(flat.untyped_storage())))
            _step(model, group.rank, step)
        model.zero_grad()
        with play(kill_at(rank=2, step=1, name="all_reduce")):
            try:
                _step(model, group.rank, 3)
            except PeerLost:
                pass
        del model.reducer.exchange.launch
        model.regroup(survivors)
        if survivors is not None:
            survivors.barrier()  # both survivors have left the step that failed
        gc.collect()
        alive = [reference for reference in memory if reference() is not None]
        # The broken group keeps its error, and the error's traceback the tensor of the call that raised it.
        assert len({id(reference()) for reference in alive}) <= 1
        assert len(memory) >= 3

    simulate(3).run(main)


@pytest.mark.fast
def test_a_wish_to_regroup_reaches_every_rank_with_the_next_step():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp))
        _step(model, group.rank, 0)
        assert not model.regroup_requested
        if group.rank == 1:
            model.request_regroup()
        _step(model, group.rank, 1)
        assert model.regroup_requested
        model.regroup(group)
        _step(model, group.rank, 2)
        assert not model.regroup_requested

    simulate(3).run(main)


@pytest.mark.fast
def test_regroup_with_init_sync_matches_the_constructor_of_a_joining_rank():
    def main(group):
        pair = group.subgroup([0, 1]) if group.rank < 2 else None
        if pair is not None:
            model = DistributedDataParallel(cases.make(cases.Mlp, seed=1), process_group=pair)
            _step(model, group.rank, 0)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)
            model.regroup(group, init_sync=True)
        else:
            model = DistributedDataParallel(cases.make(cases.Mlp, seed=2), process_group=group)
        for step in range(4):
            model.zero_grad()
            _step(model, group.rank, step)
        return [param.sum().item() for param in model.parameters()] + [
            param.grad.sum().item() for param in model.parameters()
        ]

    results = simulate(3).run(main)
    assert results[0] == results[1] == results[2]
