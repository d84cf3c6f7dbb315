"""Compiled models where workers change: no graph is made anew for a group, and a newcomer compiles before it sits."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensor_training
import torch
import torch._dynamo
from scripted_world import Die, Rows, World
from sharded_training import sha
from sharded_world import Fault
from tensor_training import make_job, on_ranks
from test_regroup import die_at
from test_tensor_parallel_job import STEP, TensorWorld
from torch import nn
from torch.nn import functional as F

from phalanx.comm import observe, simulate
from phalanx.elastic import Job, RunOptions
from phalanx.elastic._job_mesh import mesh_at, relay_of
from phalanx.tensor import Shard, distribute_tensor
from torch_settings import recompile_limit

pytestmark = [
    pytest.mark.timeout(580),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo looks at it
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with recompile_limit(64):
        yield
    torch._dynamo.reset()


def counting(told: Callable[[], None]) -> Any:
    """aot_eager, one of its own for each worker: Dynamo shares graphs among those that have the same."""
    plain = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        told()
        return plain(graph, inputs)

    return backend


# ---- groups


class Calm:
    """Whoever forms the groups of a relay, where nobody is lost."""

    def check_group(self) -> None: ...

    def survives_call(self, error: Any) -> bool:
        return False

    def waits(self, is_waiting: bool) -> None: ...


def test_a_mesh_whose_group_is_bound_anew_keeps_its_graphs() -> None:
    def body(group: Any) -> None:
        made: list[int] = []

        def place(mesh: Any) -> int:
            return mesh.get_local_rank("tp") + mesh.size(0) * mesh.shape[0] + mesh.ndim + mesh.mesh.numel()

        @partial(torch.compile, backend=counting(lambda: made.append(1)), fullgraph=True)
        def summed(x: Any) -> Any:
            return x.sum(0) * 2, x.new_zeros(4) + place(x.device_mesh)

        alone = group.subgroup([0]), group.subgroup([1])

        def check(mesh: Any, rounds: list[Any]) -> None:
            relay = relay_of(mesh)
            rows = torch.arange(20.0).reshape(5, 4)
            x = distribute_tensor(rows, mesh["tp"], [Shard(0)], src_data_rank=None).requires_grad_()
            for later in rounds:
                relay.bind(later._transport, Calm())
                sent: list[Any] = []
                with observe(lambda event, sent=sent: sent.append(event.name)):
                    total, told = summed(x)
                    total = total.full_tensor()
                assert torch.equal(total, rows.sum(0) * 2)
                assert torch.equal(told.to_local(), torch.full((4,), float(place(mesh["tp"]))))
                assert sent == (["all_reduce"] if later.size > 1 else sent)

        everyone = [group, group.subgroup([0, 1]), group.subgroup([0, 1])]
        check(mesh_at(group.rank, 2), everyone)
        assert len(made) == 1, "the same rank and size: the graph of the first round"
        turned = group.subgroup([1, 0])
        check(mesh_at(1 - group.rank, 2), [turned])
        assert len(made) == 2, "another rank holds other rows"
        check(mesh_at(0, 1), [alone[group.rank]])
        assert len(made) == 3, "another size"

    simulate(2, timeout=500.0).run(body)


@pytest.mark.soak  # compiling takes its workers ten seconds; the mesh alone is tried above
def test_a_tensor_parallel_job_that_loses_a_worker_compiles_nothing_anew(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_training, "Rows", lambda: Rows(128))  # no short batch, which would be another graph
    (_, whole, digest), _ = simulate(2).run(on_ranks, 2, 1)  # eager: aot_eager has its bits
    made: dict[str, list[int]] = defaultdict(list)  # by worker: the generations in which it compiled
    world = TensorWorld(tmp_path, monkeypatch)
    world.faults = (Fault("b", STEP, 5, ("a", "c", "d")),)

    def prepare(model: nn.Module) -> nn.Module:
        worker = world._local.coordinator.worker_id
        model[0].compile(backend=counting(lambda: made[worker].append(world.here.job.generation)))
        return model

    world.prepare = prepare
    results = world.run("abcd")
    assert isinstance(results["b"], Die)
    for worker in "acd":
        assert results[worker] == f"{sha(whole)} {digest}"
        assert world.told[worker].outcomes.count((STEP, "dropped")) == 1, "it was there when the group was lost"
        assert made[worker] == [0], "the graph of before the loss"


# ---- newcomers


def test_a_replacement_compiles_before_it_has_a_seat(tmp_path: Path, monkeypatch: Any) -> None:
    """The survivors commit steps while it warms up. They rest while its compiler is at work: torch tells whether one is
    by a flag of the whole process, which these workers share, and AdamW rounds otherwise under it."""
    world = World(tmp_path, monkeypatch)
    world.make_dataset = lambda: Rows(128)  # no short batch, which would be another graph
    seated: set[str] = set()
    made: dict[str, list[bool]] = defaultdict(list)  # by worker: for each graph, whether it had a seat
    resting, compiled, went_on = threading.Event(), threading.Event(), threading.Event()
    steps_of_newcomer: list[int] = []

    def prepare(model: nn.Module) -> nn.Module:
        worker = world._local.coordinator.worker_id
        return torch.compile(model, backend=counting(lambda: made[worker].append(worker in seated)), dynamic=False)

    def before_steps(job: Job) -> None:
        def loss_of(batch: Any) -> torch.Tensor:
            assert not compiled.is_set() or went_on.wait(200), "the survivors go on without it"
            return F.cross_entropy(job.model(batch[0]), batch[1])

        if job.worker_id == "d":
            job.warm_up(loss_of)
            compiled.set()
            job.warm_up(loss_of)
        seated.add(job.worker_id)

    def on_step(job: Job, step: Any) -> None:
        if step.number == 7 and job.worker_id == "c":
            resting.set()
        elif step.number == 7:
            assert resting.wait(200)
            world.start("d", 1, on_step=lambda job, step: steps_of_newcomer.append(step.number))
        if step.number == 7:
            assert compiled.wait(200)
        if step.number == 10 and job.worker_id == "a":
            world.await_newcomer()

    def on_commit(job: Job, step: Any, outcome: Any) -> None:
        if outcome and step.number == 7:
            went_on.set()

    def heal() -> None:
        world.break_(0, "b")
        world.agree(1, "a", "d", "c")

    world.prepare, world.before_steps = prepare, before_steps
    world.agree(0, "a", "b", "c")
    world.start("a", on_step=on_step, on_commit=on_commit)
    world.start("b", on_step=die_at(5, heal))
    world.start("c", on_step=on_step)
    results = world.join()
    assert isinstance(results["b"], Die)
    assert isinstance(results["d"], str), results["d"]
    assert results["a"] == results["c"] == results["d"]
    assert steps_of_newcomer, "it had its share of the work"
    assert made["d"] == [False], "one graph, before it had a seat"


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.norm(self.layer(x)), 0.5) * random.random() * np.random.rand()


def test_a_warm_up_leaves_nothing_behind() -> None:
    model = Drawing()
    job = Job(model, torch.optim.SGD(model.parameters()), Rows(), num_slots=2, slot_batch_size=4)
    model.layer.weight.grad = kept = torch.ones(5, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    shapes: list[Any] = []

    def loss_of(batch: Any) -> torch.Tensor:
        shapes.append(tuple(batch[0].shape))
        return F.cross_entropy(model(batch[0]), batch[1])

    try:
        job.warm_up(loss_of)
        assert shapes == [(4, 8)], "a batch as those of the loop"
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert model.layer.weight.grad is kept
        assert torch.equal(kept, torch.ones(5, 8))
        assert model.layer.bias.grad is None
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert random.getstate() == drawn[1]
        assert np.random.get_state()[1].tolist() == drawn[2]
        job.begin()
        with pytest.raises(RuntimeError, match="call it before the first step"):
            job.warm_up(loss_of)
    finally:
        job.close()


def test_a_sharded_model_has_nothing_to_warm_up_with() -> None:
    job = make_job(mesh_at(0, 2), run=RunOptions(progress=False))
    try:
        with pytest.raises(ValueError, match=r"warm_up\(\) of a sharded model"):
            job.warm_up(lambda batch: batch[0].sum())
    finally:
        job.close()
