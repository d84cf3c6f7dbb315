"""Datasets over shards: any sample by its number, few readers open, each in its own process; packing; replayed
iterators."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from phalanx.data import (
    Concatenated,
    ElasticBatchSampler,
    ElasticDistributedSampler,
    Packed,
    Replayed,
    ReplayWarning,
    ShardedDataset,
    WithWeights,
    document_lengths,
)
from phalanx.data.shards._shard_source import Expectation
from phalanx.data.sources import NodeCache, TarSource
from sharded_samples import Numbers, content_of, write_tars

pytestmark = pytest.mark.fast


def expect(slot, slots, shards, upcoming=()):
    return Expectation(slot=slot, slots=tuple(slots), shards=tuple(shards), upcoming=tuple(upcoming))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.data())
def test_samples_come_as_asked_for_whatever_the_shards(sizes, data):
    source = Numbers(sizes)
    dataset = ShardedDataset(source, transform=lambda number: (number,))
    indices = data.draw(st.lists(st.integers(0, len(dataset) - 1), max_size=20))
    assert dataset.__getitems__(indices) == [(index,) for index in indices]
    assert all(count == 1 for count in source.opened.values()), "each shard once for a batch"


def test_a_sample_that_is_not_there_is_an_index_error():
    dataset = ShardedDataset(Numbers([2, 3]))
    for index in (-1, 5):
        with pytest.raises(IndexError, match=rf"sample {index} of a dataset of 5; expected one in \[0, 5\)"):
            dataset[index]
    with pytest.raises(ValueError, match="max_open is 0"):
        ShardedDataset(Numbers([1]), max_open=0)


def test_the_last_used_stay_open_and_expected_ones_always():
    source = Numbers([1] * 6)
    dataset = ShardedDataset(source, max_open=2)
    for index in (0, 1, 0, 2, 0):
        dataset[index]
    assert source.open_now == {0, 2}
    assert source.opened[0] == 1
    dataset.expect(expect(0, [0, 1], [2, 3]))
    dataset.expect(expect(1, [0, 1], [4]))
    for index in (2, 3, 4, 5, 0, 1, 2, 3, 4):
        dataset[index]
    assert {2, 3, 4} <= source.open_now
    assert [source.opened[shard] for shard in (2, 3, 4)] == [1, 1, 1]
    assert len(source.open_now) <= 3 + 2
    dataset.expect(expect(1, [1], [4, 5]))  # slot 0 has gone to another worker
    assert source.open_now <= {4, 5}
    dataset.close()
    assert source.open_now == set()
    assert dataset[3] == 3


def test_the_next_window_is_prepared_in_the_background_and_each_shard_once():
    done = threading.Event()

    class Watched(Numbers):
        def prepare(self, shard):
            super().prepare(shard)
            if shard == 9:
                done.set()
            raise OSError("the one who reads will meet it")

    source = Watched([1] * 10)
    dataset = ShardedDataset(source)
    dataset.expect(expect(0, [0], [0], [1, 2]))
    dataset.expect(expect(0, [0], [0], [1, 2]))
    dataset.expect(expect(0, [0], [1, 2], [9]))
    assert done.wait(60)
    dataset.close()
    assert source.prepared[-1] == 9
    assert len(set(source.prepared)) == len(source.prepared)
    assert dataset[1] == 1, "a failed preparation is no failed read"


def read_in_child(dataset, results):
    results.put((dataset[3], dataset.open_shards.num_opened, os.getpid()))


def test_readers_belong_to_the_process_that_opened_them(tmp_path):
    dataset = ShardedDataset(TarSource(write_tars(tmp_path, [2, 3])))
    assert dataset[3]["x"] == content_of(3).tobytes()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=read_in_child, args=(dataset, results))
    child.start()
    sample, opened, pid = results.get(timeout=100)
    child.join(100)
    assert sample["x"] == content_of(3).tobytes()
    assert opened == 1
    assert pid != os.getpid()
    copy = pickle.loads(pickle.dumps(dataset))  # as a loader that spawns does
    assert copy.shards.digest == dataset.shards.digest
    assert copy[1]["x"] == content_of(1).tobytes()
    copy.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_loader_with_processes_gives_the_samplers_epochs(tmp_path):
    dataset = ShardedDataset(Numbers([5, 0, 7, 3] * 3))
    sampler = ElasticDistributedSampler(WithWeights(dataset), 2, 1, shuffle="shards", tail="mask")
    loader = DataLoader(WithWeights(dataset), batch_size=4, sampler=sampler, num_workers=2)
    reference = ElasticDistributedSampler(dataset, 2, 1, shuffle="shards", tail="mask")
    numbers = [number for batch, _ in loader for number in batch.tolist()]
    assert numbers == list(reference)
    batches = ElasticBatchSampler(dataset, 2, 3, slots=[1], shuffle="shards")
    loaded = [batch.tolist() for batch in DataLoader(dataset, batch_sampler=batches)]
    assert loaded == [batches.indices(step, 1) for step in range(batches.steps_per_epoch)]


# -- replayed iterators ---------------------------------------------------------------------------------------


def test_a_bare_iterator_is_replayed_on_request_and_says_what_that_costs():
    with pytest.warns(ReplayWarning, match="of 7 samples, which were counted by reading all of them, is replayed"):
        dataset = Replayed(lambda: iter(range(100, 107)))
    sampler = ElasticBatchSampler(dataset, 2, 2, slots=range(2), shuffle=False, tail="uneven")
    seen = [number for batch in sampler for number in dataset.__getitems__(batch)]
    assert seen == list(range(100, 107))
    assert dataset.num_replays == 0
    assert dataset.__getitems__([3, 1, 3]) == [103, 101, 103]
    assert dataset.num_replays == 1
    with pytest.raises(ValueError, match=r"is replayed from its beginning .* use shuffle=False"):
        ElasticBatchSampler(dataset, 2, 2, slots=())
    with pytest.raises(IndexError, match="sample 7 of a dataset of 7"):
        dataset[7]
    with pytest.warns(ReplayWarning, match="of 9 samples is replayed"):
        shorter = Replayed(lambda: range(4), length=9)
    with pytest.raises(RuntimeError, match="ended after 4 samples, but 9 were expected"):
        shorter[6]
    with pytest.raises(ValueError, match="has 0 samples"):
        Replayed(lambda: ())
    assert pickle.loads(pickle.dumps(dataset.__getstate__()["length"])) == 7


# -- packing --------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=20)


def naive_blocks(documents, block):
    return [documents[first : first + block] for first in range(0, len(documents), block)]


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.integers(1, 7), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 2))
def test_every_token_of_a_block_is_packed_once_and_documents_stay_in_one_piece(
    documents, length, block, separated, padded, seed
):
    options = {"separator": 0 if separated else None, "pad": 999 if padded else None}
    lengths = document_lengths(documents)
    packed = Packed(documents, length, lengths=lengths, block=block, seed=seed, **options)
    for number, own in enumerate(naive_blocks(documents, block)):
        tokens = sum(map(len, own)) + separated * len(own)
        assert packed.sizes[number] == (-(-tokens // length) if padded else tokens // length)
        reader = packed.open(number)
        found = reader.read(range(int(packed.sizes[number])))
        assert all(sample.shape == (length,) and sample.dtype == torch.int64 for sample in found)
        joined = [token for sample in found for token in sample.tolist()]
        order = reader.order.tolist()
        wanted = [token for place in order for token in [*own[place], *([0] if separated else [])]]
        padding = [999] * (len(joined) - len(wanted))
        assert joined == (wanted + padding)[: len(joined)]
        assert sorted(order) == list(range(len(own)))
        if len(found) > 1:
            assert torch.equal(reader.read([1])[0], found[1]), "any sequence alone"


def test_packed_documents_of_shards_are_shuffled_by_shards_and_resumed():
    class Documents(Numbers):
        pass

    documents = ShardedDataset(Documents([4, 0, 5, 3]), transform=lambda number: np.full(number % 4 + 1, number))
    packed = Packed(documents, 5, lengths=document_lengths(documents), separator=-1)
    assert packed.name_of(2) == "numbers-002"
    dataset = ShardedDataset(packed)
    sampler = ElasticBatchSampler(dataset, 2, 1, slots=range(2), shuffle="shards", tail="uneven")
    epoch = [index for batch in sampler for index in batch]
    assert sorted(epoch) == list(range(len(dataset)))
    assert len({tuple(dataset[index].tolist()) for index in epoch}) == len(epoch)
    other = ShardedDataset(Packed(documents, 4, lengths=document_lengths(documents), separator=-1))
    with pytest.raises(ValueError, match="changed since then: numbers-000"):
        ElasticBatchSampler(other, 2, 1, slots=(), shuffle="shards").load_state_dict(sampler.state_dict())


def test_an_index_of_lengths_is_kept_and_a_wrong_one_noticed(tmp_path):
    documents = [[1, 2], [3], [4, 5, 6]]
    path = tmp_path / "lengths.npy"
    assert document_lengths(documents, path).tolist() == [2, 1, 3]
    assert document_lengths([[]] * 3, path).tolist() == [2, 1, 3], "read, not counted"
    with pytest.raises(ValueError, match="has lengths of 3 documents, but there are 2"):
        document_lengths(documents[:2], path)
    packed = Packed(documents, 2, lengths=[2, 2, 3])
    with pytest.raises(ValueError, match=r"document 1 has shape \(1,\) .* says 2 tokens"):
        packed.open(0).read(range(3))
    with pytest.raises(ValueError, match="lengths has shape"):
        Packed(documents, 2, lengths=[1])
    with pytest.raises(ValueError, match="length is 0"):
        Packed(documents, 0, lengths=[2, 1, 3])


# -- the node's cache -----------------------------------------------------------------------------------------


def put(text):
    return lambda path: path.write_text(text)


def test_the_cache_never_holds_more_than_its_bound_and_keeps_what_is_needed(tmp_path):
    cache = NodeCache(tmp_path, max_shards=3)
    cache.need(["a", "b"], ["c"])
    for key in "abc":
        with cache.open(key, put(key)) as file:
            assert file.read() == key.encode()
    cache.bring("d", put("d"))
    assert cache.keys() == ["a", "b", "d"], "c was only needed later"
    cache.need(["b"], ["d"])
    cache.bring("e", put("e"))
    assert cache.keys() == ["b", "d", "e"], "nobody needs a"
    held = cache.open("b", put("never"))
    cache.need([], [])
    for key in "fgh":
        cache.bring(key, put(key))
    assert cache.keys() == ["f", "g", "h"]
    assert held.read() == b"b", "what is open can be read to its end"
    held.close()

    def broken(path):
        path.write_text("half")
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="network"):
        cache.open("x", broken)
    assert cache.keys() == ["g", "h"], "nothing half made is there"
    with cache.open("x", put("complete")) as file:
        assert file.read() == b"complete"


def need_and_die(directory):
    cache = NodeCache(directory, max_shards=1)
    cache.need(["a"], [])
    os._exit(0)


def test_what_a_dead_process_needed_is_nobodys(tmp_path):
    cache = NodeCache(tmp_path, max_shards=2)
    cache.bring("a", put("a"))
    child = multiprocessing.get_context("fork").Process(target=need_and_die, args=(tmp_path,))
    child.start()
    child.join(100)
    cache.need(["b"], [])
    for key in "bc":
        cache.bring(key, put(key))
    assert cache.keys() == ["b", "c"]


def bring_all(directory, made):
    cache = NodeCache(directory, max_shards=50)

    def make(key):
        def write(path):
            made.put(key)
            path.write_text(key)

        return write

    for number in range(20):
        with cache.open(f"k{number}", make(f"k{number}")) as file:
            assert file.read() == f"k{number}".encode()


def test_processes_of_a_node_make_each_copy_once(tmp_path):
    context = multiprocessing.get_context("fork")
    made = context.SimpleQueue()
    children = [context.Process(target=bring_all, args=(tmp_path, made)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
        assert child.exitcode == 0
    found = []
    while not made.empty():
        found.append(made.get())
    assert sorted(found) == sorted(f"k{number}" for number in range(20))


def test_a_cache_below_the_windows_is_refused_with_the_number(tmp_path):
    import gzip

    paths = []
    for path in write_tars(tmp_path / "plain", [2] * 40):
        paths.append(tmp_path / f"{path.name}.gz")
        paths[-1].write_bytes(gzip.compress(path.read_bytes()))
    small = ShardedDataset(TarSource(paths, cache=NodeCache(tmp_path / "a", max_shards=31)))
    with pytest.raises(
        ValueError, match=r"may keep 31 shards, but lanes x 2 x window = 32 .* Give max_shards=32 or more"
    ):
        ElasticBatchSampler(small, 2, 1, slots=(), shuffle="shards")
    source = TarSource(paths, cache=NodeCache(tmp_path / "b"))
    sampler = ElasticBatchSampler(ShardedDataset(source), 2, 1, slots=(), shuffle="shards")
    assert source.files.cache.bound == 32
    assert sampler.steps_per_epoch == 40
    both = Concatenated([small, [1, 2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ElasticBatchSampler(both, 1, 1, slots=())
