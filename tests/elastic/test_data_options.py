"""Which samples a job trains on: every order that the samplers have, and no dataset that it would read wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from phalanx.comm import simulate
from phalanx.data import BlockShuffled, IndexOrder, Shuffled, WeightedOrder
from phalanx.elastic import DataOptions, Job, RunOptions, Saves, WorkersDiffer
from phalanx.elastic.audit import check_directory
from phalanx.errors import RankFailed

pytestmark = pytest.mark.fast

LENGTH = 50


def make(group=None, dataset=None, saves=None, log_dir=None, **data) -> Job:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    dataset = list(torch.randn(LENGTH, 2)) if dataset is None else dataset
    return Job(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset,
        num_slots=4,
        slot_batch_size=2,
        data=DataOptions(**data),
        saves=saves,
        run=RunOptions(progress=False, group=group, log_dir=log_dir),
    )


def train(job, **limits):
    seen = []
    for step in job.steps(**limits):
        job.saving.wait_idle()
        for micro in step:
            seen += micro.indices
            micro.backward(job.model(micro.batch).square().mean())
        step.commit()
    job.close()
    return seen, job.digest()


ORDERS = {
    "block": {"shuffle": "block", "block_size": 10},
    "subset": {"order": Shuffled(IndexOrder(range(5, 30)))},
    "indices": {"order": [3, 1, 3, 7]},
    "tensor": {"order": torch.arange(20)},
    "weighted": {"order": WeightedOrder(np.arange(LENGTH), 40)},
    "sampler": {"order": WeightedRandomSampler(torch.ones(LENGTH), 30)},
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_job_takes_every_order_and_resumes_in_it_at_another_size(tmp_path, kind):
    options = ORDERS[kind]
    seen, digest = train(make(log_dir=tmp_path / "logs", **options), epochs=2)
    assert check_directory(tmp_path / "logs").problems == []
    if kind == "block":
        assert sorted(seen[:LENGTH]) == list(range(LENGTH))
        assert all(max(block) - min(block) == 9 for block in np.array(seen[:LENGTH]).reshape(5, 10))
    if kind == "subset":
        assert sorted(seen[:25]) == list(range(5, 30))
    if kind == "indices":
        assert seen == [3, 1, 3, 7] * 2
    saves = Saves(directory=tmp_path / "saves", every=1)
    train(make(saves=saves, **options), max_steps=1)

    def resume(group):
        return train(make(group, saves=saves, **options), epochs=2)[1]

    assert simulate(3).run(resume) == [digest] * 3
    with pytest.raises(ValueError, match="sampler state is of order"):
        train(make(saves=saves), epochs=2)


def test_workers_that_order_their_samples_otherwise_are_told_so():
    def main(group):
        train(make(group, **([{}, {"shuffle": False}][group.rank])), epochs=1)

    with pytest.raises(RankFailed) as caught:
        simulate(2).run(main)
    assert isinstance(caught.value.__cause__, WorkersDiffer)
    assert "order is 'shuffled(sequential)' on worker rank0 and 'sequential' on" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 4}, "block_size=4 needs shuffle='block'"),
        (
            {"block_size": 4, "shuffle": "block", "order": [1]},
            "block_size=4 needs shuffle='block' and no order",
        ),
        ({"block_size": 0, "shuffle": "block"}, "block_size is 0; expected at least 1"),
        ({"shuffle": "blocks"}, "shuffle is 'blocks'"),
    ],
)
def test_contradicting_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**options)


def test_an_order_that_does_not_fit_the_dataset_is_refused():
    with pytest.raises(ValueError, match="gives indices up to 99, but the dataset's length is 50"):
        make(order=range(100))
    with pytest.raises(TypeError, match="order is a int"):
        make(order=3)
    assert make(order=BlockShuffled(LENGTH, 7)).schedule.sampler.order.name == "block_shuffled(sequential,7)"


class Stream(IterableDataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.zeros(2)

    def __iter__(self):
        return iter(torch.zeros(LENGTH, 2))


def test_a_job_and_its_evaluation_refuse_what_is_no_map_of_samples():
    with pytest.raises(TypeError, match="dataset Stream is iterable"):
        make(dataset=Stream())
    with pytest.raises(TypeError, match="dataset is a DataLoader"):
        make(dataset=DataLoader(torch.zeros(4, 2)))
    job = make()

    def evaluate(dataset=(), function=lambda batch: {"loss": 0.0}, batch_size=4):
        return job.evaluate(dataset, function, batch_size=batch_size)

    with pytest.raises(TypeError, match="dataset Stream is iterable"):
        evaluate(Stream())
    with pytest.raises(TypeError, match=r"pass the dataset that it reads \(loader\.dataset\)"):
        evaluate(DataLoader(torch.zeros(4, 2)))
    with pytest.raises(TypeError, match="dataset is a tensor of one number"):
        evaluate(torch.tensor(0.25))
    with pytest.raises(ValueError, match="is empty"):
        evaluate([])
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        evaluate([1], batch_size=0)
    with pytest.raises(TypeError, match="function is a Tensor; expected a function of a batch"):
        evaluate(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(TypeError, match=r"function returned a tensor of shape \(\); expected means .* by name"):
        evaluate(torch.zeros(4, 2), lambda batch: batch.mean())
    with pytest.raises(TypeError, match="function returned NoneType"):
        evaluate(torch.zeros(4, 2), lambda batch: None)
    with pytest.raises(TypeError, match=r"a tensor of shape \(4,\) as 'loss'; expected its mean .* loss\.mean\(\)"):
        evaluate(torch.zeros(4, 2), lambda batch: {"loss": batch[:, 0]})
    assert evaluate(torch.ones(6, 2), lambda batch: {"mean": batch.mean()}) == {"mean": 1.0}, "a tensor has samples"
    job.close()
