"""``gradient_as_bucket_view=True``: autograd adds small gradients into the bucket; no value tells that it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp import cases
from phalanx.comm import Group, simulate
from phalanx.ddp import DistributedDataParallel
from phalanx.ddp.reducer._pass import BackwardPass
from phalanx.ddp.reducer._rebuild import TUNE_AFTER

pytestmark = pytest.mark.fast
SETTLED = TUNE_AFTER + 1


class Interrupted(Exception):
    pass


def pair() -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """A wrapper with views and one without, of the same module."""
    with_views = DistributedDataParallel(cases.make(cases.Experts), gradient_as_bucket_view=True)
    return with_views, DistributedDataParallel(cases.make(cases.Experts))


def backward(model: nn.Module, step: int, rank: int, which: int, **options: bool) -> None:
    cases.loss_of(model(cases.batch(step, rank), which)).backward(**options)


def settle(models: tuple[DistributedDataParallel, ...], rank: int) -> None:
    """Run passes until buckets stay as they are: from then on autograd adds into them."""
    for step in range(SETTLED):
        for model in models:
            model.zero_grad()
            backward(model, step, rank, rank)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_values_and_none_are_those_of_a_wrapper_without_views() -> None:
    def main(group: Group) -> None:
        models = pair()
        settle(models, group.rank)
        # Experts used: one each; the same; another pair; with a graph of the gradient; accumulated.
        for step, (first, second) in enumerate([(0, 1), (0, 0), (1, 2), (2, 2)]):
            for model in models:
                model.zero_grad()
                backward(model, step, group.rank, (first, second)[group.rank], create_graph=step == 2)
            cases.assert_same(models[0].module, models[1].module, f"experts {first}, {second}")
        for model in models:
            with model.no_sync():
                backward(model, 8, group.rank, 0)
            backward(model, 9, group.rank, 1)
        cases.assert_same(models[0].module, models[1].module, "accumulated")

    simulate(2).run(main)


def test_autograd_adds_into_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = []
    plain_lend = BackwardPass.lend

    def lend(self: BackwardPass, *args: object) -> None:
        lent.append(args)
        plain_lend(self, *args)

    monkeypatch.setattr(BackwardPass, "lend", lend)

    def main(group: Group) -> None:
        model = DistributedDataParallel(cases.make(cases.Experts), gradient_as_bucket_view=True)
        seen = []
        model.module.stem.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
        settle((model,), group.rank)
        before = len(lent)
        model.zero_grad()
        backward(model, 0, group.rank, 0)
        assert len(lent) > before, "once settled"
        assert model.module.stem.weight.grad.untyped_storage().nbytes() > model.module.stem.weight.nbytes
        alone = cases.make(cases.Experts)
        backward(alone, 0, group.rank, 0)
        assert torch.equal(seen[-1], alone.stem.weight.grad), "hooks of users see this rank's gradient, not scaled"
        before = len(lent)
        backward(model, 1, group.rank, 0)
        assert len(lent) == before, "gradients that are there are set aside, and survive a failure"
        for flag in ("find_unused_parameters", "static_graph"):
            told = DistributedDataParallel(cases.make(cases.Experts), gradient_as_bucket_view=True, **{flag: True})
            settle((told,), group.rank)
            assert len(lent) == before, "which gradients were undefined would be lost"

    simulate(1).run(main)


def test_a_backward_that_the_user_interrupts_leaves_the_next_one_right() -> None:
    def main(group: Group) -> None:
        models = pair()
        settle(models, group.rank)

        def interrupt(grad: torch.Tensor) -> None:
            raise Interrupted

        for model in models:
            model.zero_grad()
            handle = model.module.stem.weight.register_hook(interrupt)
            with pytest.raises(Interrupted):
                backward(model, 0, group.rank, 0)
            handle.remove()
            model.zero_grad()
            backward(model, 1, group.rank, group.rank)
        cases.assert_same(models[0].module, models[1].module, "after the interruption")
        assert models[0].module.experts[2].weight.grad is None

    simulate(2).run(main)
