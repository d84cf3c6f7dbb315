"""ElasticDistributedSampler as users see it: torch's surface, states, resizes, tails, epochs."""

from __future__ import annotations

import copy
import itertools
import pickle
import tracemalloc

import pytest
import torch
from torch.distributed.elastic.utils.data import ElasticDistributedSampler as TorchSampler
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from phalanx.data import ElasticBatchSampler, ElasticDistributedSampler, PaddingIndex, WithWeights, weight_of

pytestmark = pytest.mark.fast


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def replicas(length, count, **options):
    return [ElasticDistributedSampler(Numbers(length), count, rank, **options) for rank in range(count)]


def test_it_is_a_sampler_to_torch_and_to_trainers():
    sampler = ElasticDistributedSampler(Numbers(4), 1, 0)
    assert isinstance(sampler, Sampler)
    assert isinstance(sampler, DistributedSampler)


def test_positional_arguments_are_those_of_torch():
    ours, theirs = (kind(Numbers(10), 3, 1, 4) for kind in (ElasticDistributedSampler, TorchSampler))
    for name in (
        "num_replicas",
        "rank",
        "start_index",
        "epoch",
        "num_samples",
        "total_size",
        "drop_last",
        "seed",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    ("length", "count", "drop_last"),
    [
        (length, count, drop_last)
        for length in (1, 2, 5, 6, 7, 12, 100)
        for count in (1, 2, 3, 5)
        for drop_last in (False, True)
        if count <= length or not drop_last  # torch gives nothing at all there; ours refuses, see below
    ],
)
def test_without_shuffle_the_indices_are_those_of_torch(length, count, drop_last):
    for rank in range(count):
        options = {"num_replicas": count, "rank": rank, "shuffle": False, "drop_last": drop_last}
        theirs = DistributedSampler(Numbers(length), **options)
        ours = ElasticDistributedSampler(Numbers(length), **options)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_a_dataset_without_length_is_a_type_error():
    class Endless(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return index

    with pytest.raises(TypeError, match="Endless has no length"):
        ElasticDistributedSampler(Endless(), 1, 0)


class Stream(IterableDataset):
    """As the streaming datasets that divide themselves: ``len`` is this rank's share, ``[i]`` counts over all."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(4))


class Lazy:
    """No subclass of torch's; can only be iterated, and knows how long that takes."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


class Halfway(torch.utils.data.Dataset):
    """Inherits a ``__getitem__`` that only raises."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("kind", [Stream, Lazy, Halfway])
@pytest.mark.parametrize(
    "use",
    [
        lambda dataset: ElasticDistributedSampler(dataset, 1, 0),
        lambda dataset: ElasticBatchSampler(dataset, 1, 1, slots=[0]),
        lambda dataset: WithWeights(dataset),
    ],
)
def test_every_iterable_dataset_is_refused_even_with_a_length(kind, use):
    with pytest.raises(TypeError, match=f"dataset {kind.__name__} is iterable: .* Expected a map-style dataset"):
        use(kind())


def test_loaders_and_mappings_are_no_datasets():
    with pytest.raises(TypeError, match=r"dataset is a DataLoader.*pass the dataset that it reads \(loader\.dataset"):
        ElasticDistributedSampler(torch.utils.data.DataLoader(Numbers(3)), 1, 0)
    with pytest.raises(TypeError, match="dataset is a dict with keys 'train', 'test'; pass one of its values"):
        ElasticDistributedSampler({"train": Numbers(3), "test": Numbers(3)}, 1, 0)


def test_what_gives_samples_by_number_is_taken_also_when_it_can_be_iterated():
    class Many(Halfway):
        def __getitems__(self, indices):
            return indices

    subset = torch.utils.data.Subset(Stream(), range(100))
    for dataset in ([1, 2], (1, 2), range(2), torch.zeros(2), {0: "a", 1: "b"}, Many(), subset):
        assert len(ElasticDistributedSampler(dataset, 1, 0)) == len(dataset)


@pytest.mark.parametrize("start", [-1, 10, 11])
def test_a_start_outside_the_dataset_is_a_value_error(start):
    with pytest.raises(ValueError, match=rf"start_index is {start}; expected one in \[0, 10\)"):
        ElasticDistributedSampler(Numbers(10), 1, 0, start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Numbers(0), "num_replicas": 1, "rank": 0}, "is empty"),
        ({"num_replicas": 2, "rank": 2}, r"rank is 2; expected one in \[0, 2\)"),
        ({"num_replicas": 2, "rank": -1}, "rank is -1"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas is 0"),
        ({"tail": "cut"}, "tail is 'cut'"),
        ({"tail": "pad", "drop_last": True}, "contradicts"),
        ({"shuffle": "blocks"}, "shuffle is 'blocks'"),
        ({"block_size": 4}, "needs shuffle='block'"),
        ({"shuffle": "block", "block_size": 0}, "block_size is 0"),
        ({"num_replicas": 6, "rank": 0, "tail": "drop"}, "drops all 5 samples"),
        ({"order": [0, 5]}, "indices up to 5, but the dataset's length is 5"),
    ],
)
def test_mistakes_are_value_errors_that_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        ElasticDistributedSampler(**{"dataset": Numbers(5), "num_replicas": 1, "rank": 0, **arguments})


def test_more_replicas_than_samples():
    assert [list(s) for s in replicas(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]
    assert [list(s) for s in replicas(2, 5, shuffle=False, tail="uneven")] == [[0], [1], [], [], []]
    masked = [list(s) for s in replicas(2, 5, shuffle=False, tail="mask")]
    assert [[weight_of(i) for i in part] for part in masked] == [[1.0], [1.0], [0.0], [0.0], [0.0]]


@pytest.mark.parametrize("shuffle", [True, False, "block"])
def test_one_epoch_has_every_sample_once_and_epochs_differ(shuffle):
    options = {"block_size": 10} if shuffle == "block" else {}
    orders = []
    for epoch in range(3):
        samplers = replicas(97, 4, shuffle=shuffle, tail="uneven", **options)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders.append([list(s) for s in samplers])
        assert sorted(itertools.chain(*orders[-1])) == list(range(97))
    assert (orders[0] != orders[1] != orders[2]) == bool(shuffle)


def test_seeds_give_different_orders_and_a_generator_counts_as_its_seed():
    def order(seed):
        return list(ElasticDistributedSampler(Numbers(50), 1, 0, seed=seed))

    assert order(1) != order(2)
    assert order(torch.Generator().manual_seed(2)) == order(2)
    assert sorted(order(-1)) == sorted(order(2**70)) == list(range(50))


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "mask"])
def test_tails(tail):
    parts = [list(s) for s in replicas(10, 4, shuffle=False, tail=tail)]
    assert [len(s) for s in replicas(10, 4, tail=tail)] == [len(part) for part in parts]
    if tail == "drop":
        assert parts == [[0, 4], [1, 5], [2, 6], [3, 7]]
    elif tail == "uneven":
        assert parts == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    else:
        assert parts == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
        marked = [[isinstance(index, PaddingIndex) for index in part] for part in parts]
        assert marked == [[False] * 3] * 2 + [[False, False, tail == "mask"]] * 2


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "mask"])
def test_total_size_is_what_all_replicas_yield(tail):
    samplers = replicas(11, 4, tail=tail, start_index=2)
    assert samplers[0].total_size == sum(len(list(s)) for s in samplers)


def test_copies_are_independent():
    sampler = ElasticDistributedSampler(Numbers(100), 2, 0)
    iterator = iter(sampler)
    for _ in range(5):
        next(iterator)
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.state_dict() == sampler.state_dict()
        twin.resize(1, 0)
        assert sorted(twin) == sorted(list(ElasticDistributedSampler(Numbers(100), 1, 0))[10:])
    assert len(list(iterator)) == 45


class Endless(Numbers):
    """A dataset too large for len() of a list, but not for a position."""


@pytest.mark.parametrize("shuffle", [True, False, "block"])
def test_a_trillion_samples_take_less_than_a_megabyte(shuffle):
    next(iter(ElasticDistributedSampler(Endless(10**11), 8, 3, shuffle=shuffle)))  # what is imported at first use
    sampler = ElasticDistributedSampler(Endless(10**12), 8, 3, shuffle=shuffle)
    tracemalloc.start()
    try:
        iterator = iter(sampler)
        first = next(iterator)
        to_first = tracemalloc.get_traced_memory()[1]
        for _ in range(30_000):
            next(iterator)
        whole = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 <= first < 10**12
    assert to_first < 200_000
    assert whole < 1_000_000


def test_seeking_in_a_trillion_samples_gives_what_iterating_would():
    far = 10**12 - 1000
    one, other = (ElasticDistributedSampler(Endless(10**12), 1, 0, far) for _ in range(2))
    tail = list(one)
    assert len(set(tail)) == 1000
    iterator = iter(other)
    other.load_state_dict({**other.state_dict(), "position": far + 990})
    assert list(iterator) == tail[990:]
