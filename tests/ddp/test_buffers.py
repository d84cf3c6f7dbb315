"""Buffers: who has which value, before and after forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp import cases
from phalanx.comm import observe, simulate
from phalanx.ddp import DistributedDataParallel, _BufferCommHookLocation

pytestmark = pytest.mark.fast


class Counts(nn.Module):
    """Counts its calls in a buffer, starting from a number of its own."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("count", torch.tensor([start]))
        self.register_buffer("total", torch.tensor([int(start)]))

    def forward(self, x):
        self.seen = self.count.item()
        self.count += 1
        return self.layer(x)


def test_rank_0s_buffers_reach_all_before_each_forward():
    def main(group):
        model = DistributedDataParallel(Counts(10.0 * group.rank))
        assert model.module.count.item() == 0.0
        for step in range(3):
            model.module.count += group.rank
            cases.loss_of(model(cases.batch(step, group.rank))).backward()
            assert model.module.seen == step
        model.module.count += group.rank
        model.sync_buffers()
        assert model.module.count.item() == 3.0

    simulate(3).run(main)


def test_reassigned_buffers_are_found_by_name():
    def main(group):
        model = DistributedDataParallel(Counts(0.0))
        model.module.count = torch.tensor([float(group.rank + 5)])
        model(cases.batch(0, group.rank))
        assert model.module.seen == 5.0

    simulate(2).run(main)


def test_forward_sync_buffers_false_still_syncs_at_construction():
    def main(group):
        model = DistributedDataParallel(Counts(10.0 * group.rank), forward_sync_buffers=False)
        assert model.module.count.item() == 0.0
        model.module.count += group.rank
        model(cases.batch(0, group.rank))
        assert model.module.seen == group.rank
        assert not model.broadcast_buffers
        with pytest.warns(FutureWarning):
            model = DistributedDataParallel(Counts(10.0 * group.rank), broadcast_buffers=False)
        assert model.module.count.item() == 10.0 * group.rank
        assert not model.will_sync_module_buffers()

    simulate(2).run(main)


def test_buffers_are_not_synchronised_after_a_local_forward():
    def main(group):
        model = DistributedDataParallel(Counts(0.0))
        with model.no_sync():
            cases.loss_of(model(cases.batch(0, group.rank))).backward()
        names = []
        with observe(lambda event: names.append(event.name)):
            model(cases.batch(1, group.rank))
        assert names == []
        with observe(lambda event: names.append(event.name)):
            model(cases.batch(2, group.rank))
        assert names == ["broadcast", "broadcast"]

    simulate(2).run(main)


@pytest.mark.parametrize("location", list(_BufferCommHookLocation))
def test_a_buffer_hook_replaces_the_broadcast(location):
    def main(group):
        model = DistributedDataParallel(Counts(0.0))

        def add_up(state, buffers):
            assert state == "state"
            assert set(buffers) == {"count", "total"}
            group.all_reduce(buffers["count"])

        model._register_buffer_comm_hook("state", add_up, location)
        model.module.count.fill_(group.rank + 1.0)
        model(cases.batch(0, group.rank))
        if location is _BufferCommHookLocation.PRE_FORWARD:
            assert (model.module.seen, model.module.count.item()) == (3.0, 4.0)
        else:
            assert (model.module.seen, model.module.count.item()) == (group.rank + 1.0, 5.0)

    simulate(2).run(main)


def test_futures_of_a_buffer_hook_are_awaited_by_the_end_of_backward():
    def main(group):
        model = DistributedDataParallel(Counts(0.0))
        waited = []

        class Future:
            def wait(self):
                waited.append(True)

        model._register_buffer_comm_hook(None, lambda state, buffers: [Future(), Future()])
        output = model(cases.batch(0, group.rank))
        assert not waited
        cases.loss_of(output).backward()
        assert waited == [True, True]

    simulate(2).run(main)


def test_ignored_parameters_and_buffers_are_left_alone():
    def main(group):
        module = Counts(10.0 * group.rank)
        with torch.no_grad():
            module.layer.bias.fill_(float(group.rank))
            module.layer.weight.fill_(float(group.rank))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layer.bias", "count"])
        model = DistributedDataParallel(module)
        assert module.layer.bias.tolist() == [float(group.rank)] * 4
        assert not module.layer.weight.any()
        assert module.count.item() == 10.0 * group.rank
        assert module.total.item() == 0
        model(torch.ones(1, 8) * (group.rank + 1)).sum().backward()
        assert module.seen == 10.0 * group.rank
        assert module.layer.bias.grad.tolist() == [1.0] * 4
        assert module.layer.weight.grad.unique().tolist() == [1.5]
        assert [name for name, _ in model._get_data_parallel_params(module, named_params=True)] == ["layer.weight"]

    simulate(2).run(main)
