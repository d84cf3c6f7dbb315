"""Gradients that are sent while backward goes on (``RunOptions(overlap=True)``): the same bits, also after losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import NUM_STEPS, Cluster
from elastic_training import make_job, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.comm import observe, simulate
from phalanx.elastic import Job, RunOptions
from phalanx.elastic.reduce import _early_send
from phalanx.elastic.reduce._flat_layout import FlatLayout

TINY = 512
"""Bytes of a bucket here: the models of these tests are small."""


@pytest.fixture(autouse=True)
def _tiny_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    of = FlatLayout.of
    monkeypatch.setattr(FlatLayout, "of", lambda *args: of(*args, bucket_bytes=TINY))


def run(group, overlap, **keywords):
    job = make_job("adamw", run=RunOptions(progress=False, group=group, overlap=overlap), **keywords)
    return train(job, epochs=1), job.digest()


@pytest.mark.fast
def test_buckets_are_cut_from_the_end_of_the_model_and_go_in_that_order():
    params = [
        torch.zeros(count, dtype=dtype)
        for count, dtype in [(10, torch.float32), (200, torch.float32), (9, torch.bfloat16), (60, torch.float32)]
    ] + [torch.zeros(90)]
    layout = FlatLayout.of(params, [torch.zeros(7)], 4)
    assert [bucket.params for bucket in layout.buckets] == [(0,), (1,), (3, 4), (2,)]
    assert layout.send_order == [2, 3, 1, 0], "the first bucket holds what is known only at the end"
    assert layout.buckets[0].length > layout.buckets[0].num_summed > 10
    assert FlatLayout.of([], [], 4).send_order == [0]


@pytest.mark.parametrize("parts", [1, 3])
def test_overlap_changes_no_bit_for_any_number_of_workers(parts):
    losses, digest = run(None, False, parts=parts)
    for size in (1, 2, 3, 5, 9):
        results = simulate(size).run(run, True, parts=parts)
        assert {found for _, found in results} == {digest}, f"{size} workers"
        assert results[0][0] == losses


def test_workers_that_overlap_and_workers_that_do_not_go_together():
    _, digest = run(None, False)
    results = simulate(3).run(lambda group: run(group, group.rank == 1))
    assert {found for _, found in results} == {digest}


def small_job(group, model, overlap=True):
    data = torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = RunOptions(progress=False, group=group, overlap=overlap)
    return Job(model, optimizer, data, num_slots=4, slot_batch_size=2, run=options)


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))


@pytest.mark.fast
def test_buckets_go_before_the_backward_pass_has_come_to_the_first_layer():
    def main(group, overlap):
        model = deep()
        job = small_job(group, model, overlap)
        sent, before = [], []
        model[0].weight.register_hook(lambda grad: before.append(len(sent)))
        with observe(lambda event: sent.append(event.name) if event.group is group else None):
            for step in job.steps(max_steps=1):
                for micro in step:
                    sent.clear()
                    before.clear()
                    micro.backward(F.mse_loss(model(micro.inputs), micro.targets))
                step.commit()
        return before[-1], sorted(sent)

    overlapped = simulate(2).run(main, True)
    afterwards = simulate(2).run(main, False)
    assert all(count >= 4 for count, _ in overlapped)
    assert all(count == 0 for count, _ in afterwards)
    assert overlapped[0][1] == afterwards[0][1], "the same collectives"


@pytest.mark.fast
@pytest.mark.parametrize("how", ["in place", "another tensor"])
def test_a_gradient_that_is_changed_after_it_was_sent_is_named(how):
    def main(group):
        model = deep()
        job = small_job(group, model)
        for step in job.steps(max_steps=1):
            for micro in step:
                micro.backward(F.mse_loss(model(micro.inputs), micro.targets))
                if how == "in place":
                    model[9].bias.grad.mul_(0.5)
                else:
                    model[9].bias.grad = model[9].bias.grad * 0.5

    with pytest.raises(Exception, match=r"gradient of 9\.bias was changed after micro\.backward"):
        simulate(2).run(main)


@pytest.mark.fast
def test_a_gradient_that_comes_twice_in_one_pass_is_named_and_never_half_a_sum():
    class Twice(nn.Module):
        """The same layer in two reentrant checkpoints: its gradient is accumulated twice."""

        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(8, 32), nn.Linear(32, 32)

        def forward(self, x):
            x = checkpoint(self.shared, self.first(x), use_reentrant=True)
            return checkpoint(self.shared, x, use_reentrant=True)

    def main(group):
        model = Twice()
        job = small_job(group, model)
        for step in job.steps(max_steps=1):
            for micro in step:
                micro.backward(model(micro.inputs).square().mean())
            step.commit()

    with pytest.raises(Exception, match=r"gradient of shared\.(weight|bias) was changed after"):
        simulate(2).run(main)


@pytest.mark.fast
def test_an_error_of_a_collective_waits_for_the_reduction(monkeypatch):
    """The pass goes on: what a hook raises would come out of the user's ``micro.backward``."""
    from phalanx.errors import PeerLost

    model = deep()

    class Failing:
        def __init__(self, *args, **keywords):
            self.next = len(layout.buckets) - 1

        def send(self):
            raise PeerLost("told to")

    monkeypatch.setattr(_early_send, "BucketSums", Failing)

    def main(group):
        nonlocal layout
        job = small_job(group, model)
        layout = job.pool.layout
        for step in job.steps(max_steps=1):
            for micro in step:
                micro.backward(F.mse_loss(model(micro.inputs), micro.targets))
            step.reduce()

    layout = FlatLayout.of(list(model.parameters()), [], 4)
    with pytest.raises(Exception, match="told to"):
        simulate(2).run(main)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "job", 3, NUM_STEPS, script_flag="--overlap", hold=10)
    yield cluster
    cluster.close()


@pytest.mark.timeout(400)
def test_a_worker_that_is_killed_when_half_of_its_gradients_are_sent(cluster, undisturbed):
    cluster.wait_step(5)
    first, second, _ = cluster.pids()
    for worker, step in ((second, 12), (first, 30)):
        (cluster.directory / f"send-{worker}").write_text(str(step))
    cluster.release()
    verdict = cluster.finish()
    assert verdict.num_steps == NUM_STEPS
    assert cluster.digests() == {undisturbed}
    lost = {worker for event in cluster.events("regrouped") for worker in event["left"]}
    assert {first, second} <= lost
    assert verdict.num_dropped > 0
