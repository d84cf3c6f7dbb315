"""Uneven inputs, on simulated ranks; parity with torch's is in test_parity_features.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp import cases
from phalanx.comm import simulate
from phalanx.ddp import DistributedDataParallel, Join, Joinable, JoinHook, ReplicaDrift
from phalanx.errors import RankFailed

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("lengths", [(1, 4, 3), (5, 5, 5), (0, 2, 6)])
def test_ranks_with_less_data_contribute_nothing_and_end_with_the_same_model(initial, lengths):
    def main(group):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False), bucket_cap_mb=0.001)
        with torch.no_grad():
            model.module.weight.fill_(0.0)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(lengths[group.rank]):
                model.zero_grad()
                model(torch.full((1, 1), float(group.rank + 1))).sum().backward()
                active = [rank + 1.0 for rank in range(3) if lengths[rank] > step]
                expected = sum(active) / (3 if initial else len(active))
                torch.testing.assert_close(model.module.weight.grad, torch.tensor([[expected]]))
                with torch.no_grad():
                    model.module.weight += model.module.weight.grad
        assert not model._join_config.enable
        return model.module.weight.item()

    results = simulate(3).run(main)
    assert len(set(results)) == 1
    assert results[0] != 0.0


def test_accumulation_buffers_and_rebuilding_inside_join():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.ConvNet), bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(3 + 4 * group.rank):
                optimizer.zero_grad()
                with model.no_sync():
                    cases.loss_of(model(cases.batch(step, 10 + group.rank))).backward()
                cases.loss_of(model(cases.batch(step, group.rank))).backward()
                optimizer.step()
        return [tensor.sum().item() for tensor in model.state_dict().values()]

    results = simulate(3).run(main)
    assert results[0] == results[1] == results[2]


def test_throw_on_early_termination_raises_on_every_rank():
    def main(group):
        model = DistributedDataParallel(nn.Linear(8, 1))
        done = []

        def train():
            with model.join(throw_on_early_termination=True):
                for step in range(2 + group.rank):
                    model(cases.batch(step, group.rank)).sum().backward()
                    done.append(step)

        with pytest.raises(RuntimeError, match="no more inputs"):
            train()
        return done

    assert simulate(3).run(main) == [[0, 1]] * 3


def test_disabled_join_does_nothing():
    def main(group):
        model = DistributedDataParallel(nn.Linear(8, 1))
        with model.join(enable=False):
            model(cases.batch(0, group.rank)).sum().backward()

    simulate(2).run(main)


def test_an_exception_inside_is_passed_on():
    def main(group):
        model = DistributedDataParallel(nn.Linear(8, 1))
        with pytest.raises(KeyError), model.join():
            raise KeyError("from the user's loop")

    simulate(2).run(main)


class Counter(Joinable):
    """Counts the iterations of all ranks; a rank that is done adds nothing."""

    def __init__(self, group) -> None:
        Joinable.__init__(self)
        self.group = group
        self.total = 0.0
        self.last = None

    def count(self) -> None:
        Join.notify_join_context(self)
        self.add(1.0)

    def add(self, value: float) -> None:
        tensor = torch.tensor([value])
        self.group.all_reduce(tensor)
        self.total += tensor.item()

    def join_hook(self, **kwargs):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                counter.add(0.0)

            def post_hook(self, is_last_joiner):
                counter.last = is_last_joiner

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group


def test_several_joinables_at_once():
    def main(group):
        model, counter = DistributedDataParallel(nn.Linear(8, 1), process_group=group), Counter(group)
        with Join([model, counter]):
            for step in range(1 + group.rank):
                model(cases.batch(step, group.rank)).sum().backward()
                counter.count()
        return counter.total, counter.last

    assert simulate(3).run(main) == [(6.0, False), (6.0, False), (6.0, True)]


def test_mistakes_are_refused():
    def main(group):
        with pytest.raises(ValueError, match="at least one"):
            Join([])
        other = group.subgroup([0, 1])
        with pytest.raises(ValueError, match="same process group"):
            Join([Counter(group), Counter(other)])

        class Forgot(Counter):
            def __init__(self) -> None:
                pass

        with pytest.raises(AssertionError, match=r"Joinable.__init__"):
            Join.notify_join_context(Forgot())

    simulate(2).run(main)


def test_ranks_that_never_join_the_context_deadlock_is_reported_not_hidden():
    def main(group):
        model = DistributedDataParallel(nn.Linear(8, 1))
        for step in range(1 + group.rank):
            model(cases.batch(step, group.rank)).sum().backward()

    with pytest.raises((RankFailed, RuntimeError)):
        simulate(2).run(main)


def test_the_fingerprint_is_taken_in_join_while_all_ranks_have_data():
    def main(group):
        model = DistributedDataParallel(cases.make(cases.Mlp), fingerprint_every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(4 + 3 * group.rank):
                optimizer.zero_grad()
                cases.loss_of(model(cases.batch(step, group.rank))).backward()
                optimizer.step()
        assert model._stats.steps == 7
        weights = [param.detach().clone() for param in model.parameters()]

        def drift():
            with model.join():
                for step in range(4):
                    with torch.no_grad():
                        next(model.parameters()).add_(group.rank)
                    cases.loss_of(model(cases.batch(step, group.rank))).backward()

        with pytest.raises(ReplicaDrift) as caught:
            drift()
        assert caught.value.ranks == (1,)
        return weights

    first, second = simulate(2).run(main)
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


def test_a_fingerprint_in_join_needs_the_first_place():
    def main(group):
        first, second = (DistributedDataParallel(cases.make(cases.Mlp), fingerprint_every=every) for every in (0, 2))

        def both():
            with Join([first, second]):
                x = cases.batch(0, group.rank)
                (first(x) + second(x)).sum().backward()

        with pytest.raises(RuntimeError, match="first of the joinables"):
            both()

    simulate(2).run(main)
