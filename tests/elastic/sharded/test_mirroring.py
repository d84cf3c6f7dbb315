"""Reduced gradients reach their mirrors in parts of any size, in buffers that are there already."""

from __future__ import annotations

import threading

import pytest
from sharded_training import make_job, train, weights

from phalanx.comm import observe, simulate
from phalanx.elastic import RunOptions, _sharded_step
from phalanx.elastic.sharded import _mirroring
from phalanx.fsdp.unit import _unit_memory
from phalanx.fsdp.unit._unit_memory import BufferPool


@pytest.fixture(scope="module")
def unsharded() -> str:
    job = make_job(sharded=False, is_random=False, run=RunOptions(progress=False, threads=1))
    train(job, max_steps=3)
    return weights(job)


@pytest.mark.parametrize("copies", [2, 3])
def test_many_small_parts_bring_the_same_bits_as_one(monkeypatch, unsharded, copies):
    def main(group):
        num = []
        job = make_job(is_random=False, group=group, copies=copies)
        with observe(lambda event: num.append(event.name)):
            train(job, max_steps=3)
        return weights(job), num.count("all_to_all")

    in_one = simulate(3).run(main)
    monkeypatch.setattr(_mirroring, "PART_BYTES", 1024)
    in_parts = simulate(3).run(main)
    assert {digest for digest, _ in in_one + in_parts} == {unsharded}
    assert in_parts[0][1] > in_one[0][1]


def test_mirrors_are_reached_in_the_buffers_in_which_gradients_were_reduced(monkeypatch):
    here = threading.local()
    new_buffer, acquire, spread = _unit_memory.new_buffer, BufferPool.acquire, _sharded_step.spread_gradients

    def noted_new(*args):
        here.log.append("new")
        return new_buffer(*args)

    def noted_acquire(*args):
        here.log.append("lent")
        return acquire(*args)

    def watched(*args):
        here.log.append("begin")
        spread(*args)
        here.log.append("end")

    monkeypatch.setattr(_unit_memory, "new_buffer", noted_new)
    monkeypatch.setattr(BufferPool, "acquire", noted_acquire)
    monkeypatch.setattr(_sharded_step, "spread_gradients", watched)

    def main(group):
        here.log = []
        train(make_job(is_random=False, group=group, copies=2), max_steps=4)
        return here.log

    for log in simulate(3).run(main):
        ends = [at for at, what in enumerate(log) if what == "end"]
        begins = [at for at, what in enumerate(log) if what == "begin"]
        assert [log[begin + 1 : end] for begin, end in zip(begins, ends, strict=True)] == [["lent", "lent"]] * 4
        assert "new" in log
