"""Parameters may be frozen, unfrozen, added and removed after wrapping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp import cases
from ddp.naive import NaiveDataParallel
from phalanx.comm import observe, simulate
from phalanx.ddp import DistributedDataParallel, ReplicaMismatch
from phalanx.errors import RankFailed

pytestmark = pytest.mark.fast


def both(group, change_at, changes, steps=12):
    """Train the wrapper and the naive twin; apply ``changes[k]`` to both modules before step ``change_at[k]``."""
    model = DistributedDataParallel(cases.make(cases.Tied))
    reference = NaiveDataParallel(cases.make(cases.Tied), group)
    for step in range(steps):
        for twin in (model, reference):
            for when, change in zip(change_at, changes, strict=True):
                if when == step:
                    torch.manual_seed(step)
                    change(twin.module)
            twin.zero_grad()
            cases.loss_of(twin(cases.batch(step, group.rank))).backward()
        reference.reduce_gradients()
        cases.assert_same(model.module, reference.module, f"step {step}", exact=group.size == 2)
        with torch.no_grad():
            for twin in (model, reference):
                for param in twin.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
    return model


def freeze(module):
    module.first.weight.requires_grad_(False)
    module.head.bias.requires_grad_(False)


def unfreeze(module):
    module.first.weight.requires_grad_(True)
    module.head.bias.requires_grad_(True)


def add(module):
    module.head = nn.Sequential(module.head, nn.Linear(4, 4))


def replace(module):
    module.first = nn.Linear(8, 8)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_freezing_and_unfreezing(at):
    def main(group):
        model = both(group, [at, at + 3], [freeze, unfreeze])
        assert model.ddp_logging_data()["num_parameter_tensors"] == 5

    simulate(2).run(main)


def test_adding_and_replacing_parts_of_the_module():
    def main(group):
        model = both(group, [2, 5, 8], [add, replace, freeze_odd])
        assert "head.1.weight" in dict(model.module.named_parameters())

    simulate(3).run(main)


def freeze_odd(module):
    module.second.bias.requires_grad_(False)


def test_a_change_that_only_one_rank_makes_is_named():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Tied))
        for step in range(4):
            if step == 2 and group.rank == 1:
                freeze_odd(model.module)
            model.zero_grad()
            cases.loss_of(model(cases.batch(step, group.rank))).backward()

    with pytest.raises(RankFailed, match=r"rank 0 has parameter 'second.bias' \(of 5\), rank 1 has not \(of 4\)"):
        simulate(2).run(main)


def test_steps_without_a_change_send_nothing_about_it():
    def main(group):
        model = both(group, [2], [freeze])
        names = []
        with observe(lambda event: names.append(event.name)):
            cases.loss_of(model(cases.batch(20, group.rank))).backward()
        assert names == ["all_reduce"]

    simulate(2).run(main)


class Different(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4 if kind == "shape" else 5)
        self.second = nn.Linear(5, 2, dtype=torch.float64 if kind == "dtype" else torch.float32)
        if kind == "count":
            self.third = nn.Linear(2, 2)
        if kind == "order":
            self.first = self._modules.pop("first")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"'first.weight' has shape \[5, 3\] on rank 0 but \[4, 3\] on rank 2"),
        ("dtype", r"'second.weight' has dtype torch.float32 on rank 0 but torch.float64 on rank 2"),
        ("order", r"where rank 0 has parameter 'first.weight', rank 2 has 'second.weight'"),
        ("count", r"rank 2 has parameter 'third.bias' \(of 6\), rank 0 has not \(of 4\)"),
    ],
)
def test_different_replicas_are_refused_and_named(kind, message):
    def main(group):
        DistributedDataParallel(Different(kind if group.rank == 2 else "same"))

    with pytest.raises(RankFailed, match=message) as caught:
        simulate(3).run(main)
    assert isinstance(caught.value.__cause__, ReplicaMismatch)
