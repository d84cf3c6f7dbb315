"""A sharded job reduces the gradients of a unit while backward goes on: they travel before earlier layers compute."""

from __future__ import annotations

import threading

import pytest
from scripted_world import Rows
from sharded_training import build, make_optimizer
from torch.nn import functional as F

from phalanx.comm import observe, simulate
from phalanx.elastic import Job, RunOptions
from phalanx.fsdp.unit._unit import Unit

UNIT = "unit 'middle'"


@pytest.mark.parametrize("is_leaf", [True, False], ids=["inputs of the loader", "computed inputs"])
def test_a_unit_is_sent_before_backward_ends_and_waited_for_later(monkeypatch, is_leaf):
    """The gradient of the inputs is what a backward pass computes last; that of a leaf comes before the weights'."""
    here = threading.local()
    start, finish = Unit.start_reduce, Unit.finish_reduce

    def noted_start(unit, to, *, async_op=False):
        here.log.append(f"starts {unit}")
        start(unit, to, async_op=async_op)
        here.log.append(f"started {unit}")

    def noted_finish(unit):
        here.log.append(f"waits for {unit}")
        finish(unit)

    def main(group):
        here.log = []
        model = build(sharded=True, is_random=False)
        optimizer = make_optimizer("adamw", model)
        run = RunOptions(progress=False, group=group, threads=1)
        job = Job(model, optimizer, Rows(), num_slots=group.size, slot_batch_size=4, copies=1, run=run)
        for step in job.steps(max_steps=1):
            for micro in step:
                inputs = micro.inputs.requires_grad_()
                inputs = inputs if is_leaf else inputs * 1
                inputs.register_hook(lambda grad: here.log.append("inputs"))
                micro.backward(F.cross_entropy(model(inputs), micro.targets))
                here.log.append("end of backward")
            step.commit()
        return here.log

    monkeypatch.setattr(Unit, "start_reduce", noted_start)
    monkeypatch.setattr(Unit, "finish_reduce", noted_finish)
    with observe(lambda event: here.log.append(event.name) if hasattr(here, "log") else None):
        logs = simulate(2).run(main)
    for log in logs:
        sent = log[log.index(f"starts {UNIT}") : log.index(f"started {UNIT}")]
        assert "all_to_all" in sent, log
        order = [log.index(what) for what in (f"started {UNIT}", "inputs", f"waits for {UNIT}", "end of backward")]
        assert order == sorted(order), log
        assert sorted(what for what in log if what.startswith("starts")) == [
            "starts unit 'first'",
            "starts unit 'middle'",
            "starts unit 'root'",
        ], "each once"
