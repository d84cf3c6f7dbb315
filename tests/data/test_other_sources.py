"""MDS, Parquet, litdata and Hugging Face datasets: the samples that were written, and refusals by name."""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import pytest
import torch

from phalanx.data import ElasticBatchSampler, ShardedDataset
from phalanx.data.sources import LitDataSource, MDSSource, ParquetSource, from_huggingface
from sharded_samples import content_of, write_mds, write_parquets

fast = pytest.mark.fast
PYARROW = "pip install -c constraints.txt 'phalanx-train[parquet]'"


def same(left, right):
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        assert left.dtype == right.dtype
        return np.array_equal(left, right)
    return left == right


# -- MDS ------------------------------------------------------------------------------------------------------

COLUMNS = {
    "a": "str", "b": "int", "c": "ndarray", "d": "ndarray:int32:2,3", "e": "bytes", "f": "json", "g": "float32",
    "h": "uint8",
}  # fmt: skip


def mds_sample(number):
    return {
        "a": f"text ä {number}", "b": number - 3, "c": np.arange(number + 1, dtype=np.float32).reshape(1, -1),
        "d": np.arange(6, dtype=np.int32).reshape(2, 3) + number, "e": bytes(range(number)), "f": {"k": [number, None]},
        "g": np.float32(number / 7), "h": np.uint8(number),
    }  # fmt: skip


@fast
def test_mds_samples_are_those_that_were_written(tmp_path):
    written = [[mds_sample(number) for number in numbers] for numbers in (range(5), range(0), range(5, 8))]
    source = MDSSource(write_mds(tmp_path, COLUMNS, written))
    assert source.sizes.tolist() == [5, 0, 3]
    dataset = ShardedDataset(source)
    for number in range(8):
        found = dataset[number]
        assert found.keys() == COLUMNS.keys()
        assert all(same(found[name], value) for name, value in mds_sample(number).items())


@fast
def test_mds_folders_that_cannot_be_read_safely_are_refused(tmp_path):
    folder = write_mds(tmp_path, {"x": "int"}, [[{"x": 1}, {"x": 2}]])
    index = json.loads((folder / "index.json").read_text())

    def changed(**values):
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [{**index["shards"][0], **values}]}))
        return MDSSource(folder)

    with pytest.raises(ValueError, match="column 'x' holds pickles, which run code"):
        changed(column_encodings=["pkl"])
    with pytest.raises(ValueError, match="column 'x' has encoding 'tensor'; known are"):
        changed(column_encodings=["tensor"])
    with pytest.raises(ValueError, match=r"shard\.00000\.mds is compressed with zstd"):
        changed(compression="zstd")
    with pytest.raises(ValueError, match="no name of a file in this folder"):
        changed(raw_data={"basename": "../secret"})
    with pytest.raises(ValueError, match="format 'jsonl'; expected 'mds'"):
        changed(format="jsonl")
    with pytest.raises(ValueError, match=r"has 2 samples, but index\.json says 3"):
        changed(samples=3).open(0)
    path = folder / "shard.00000.mds"
    source = changed()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"shard\.00000\.mds: sample 1 has 5 of 8 bytes"):
        ShardedDataset(source)[1]
    (folder / "index.json").write_text('{"version": 1, "shards": []}')
    with pytest.raises(ValueError, match="has version 1; expected 2"):
        MDSSource(folder)


# -- Parquet --------------------------------------------------------------------------------------------------


@fast
def test_parquet_rows_are_those_that_were_written(tmp_path):
    pytest.importorskip("pyarrow", reason=PYARROW)
    paths = write_parquets(tmp_path, [7, 0, 5], rows=3)
    source = ParquetSource(paths)
    assert source.sizes[source.sizes > 0].tolist() == [3, 3, 1, 3, 2]
    dataset = ShardedDataset(source)
    for number, row in enumerate(dataset.__getitems__(range(12))):
        assert same(row["x"], content_of(number))
        assert row["cls"] == number % 3
        assert type(row["cls"]) is int
    assert list(ShardedDataset(ParquetSource(paths, columns=["cls"]))[4]) == ["cls"]
    with pytest.raises(ValueError, match=r"train-0000\.parquet has no column 'y'; it has x, cls"):
        ParquetSource(paths, columns=["y"])
    state = ElasticBatchSampler(dataset, 2, 2, slots=(), shuffle="shards").state_dict()
    write_parquets(tmp_path / "other", [2, 0, 5], rows=3)
    (tmp_path / "other" / "train-0000.parquet").replace(paths[0])
    with pytest.raises(ValueError, match=r"changed since then: train-0000\.parquet \(row group 0\)"):
        ElasticBatchSampler(ShardedDataset(ParquetSource(paths)), 2, 2, slots=(), shuffle="shards").load_state_dict(
            state
        )
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train-0000\.parquet is no Parquet file, or was cut off"):
        ParquetSource(paths)


@fast
def test_every_kind_of_column_comes_as_python_has_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason=PYARROW)
    from pyarrow import parquet

    table = pyarrow.table(
        {
            "text": ["a", None, "c"],
            "tokens": pyarrow.array([[1, 2], [], [3]], pyarrow.large_list(pyarrow.int32())),
            "holes": pyarrow.array([[1, None], None, [3]], pyarrow.list_(pyarrow.int64())),
            "nested": [{"k": 1}, {"k": 2}, {"k": 3}],
            "words": [["x"], ["y", "z"], []],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = ShardedDataset(ParquetSource([tmp_path / "a.parquet"])).__getitems__([2, 0, 1])
    expected = [table.to_pylist()[number] for number in (2, 0, 1)]
    for row, wanted in zip(rows, expected, strict=True):
        tokens = row.pop("tokens")
        assert tokens.dtype == np.int32
        assert tokens.tolist() == wanted.pop("tokens")
        assert row == wanted
        tokens[:] = 0  # each sample is its own


@fast
def test_without_a_package_its_source_says_how_to_get_it(monkeypatch, tmp_path):
    import importlib

    def missing(name, *rest):
        raise ImportError(name)

    (tmp_path / "index.json").write_text(json.dumps({"chunks": [], "config": {}}))
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'phalanx-train\[parquet\]'"):
        ParquetSource(["x.parquet"])
    with pytest.raises(ImportError, match="pip install litdata"):
        LitDataSource(tmp_path)


# -- litdata --------------------------------------------------------------------------------------------------


def test_litdata_samples_are_all_of_those_that_were_written(tmp_path):
    """Whatever its own ``len`` says: the numbers are those of the index."""
    litdata = pytest.importorskip("litdata", reason="it needs torchvision, whose wheels do not load beside torch+cpu")
    from litdata.streaming.writer import BinaryWriter

    assert litdata.StreamingDataset is not None
    writer = BinaryWriter(str(tmp_path / "data"), chunk_size=4)
    for number in range(10):
        writer[number] = {"number": number, "x": torch.from_numpy(content_of(number))}
    writer.done()
    writer.merge()
    source = LitDataSource(tmp_path / "data", max_cache_size="1GB")
    assert source.sizes.sum() == 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = ShardedDataset(source)
        for number, sample in enumerate(dataset.__getitems__(range(10))):
            assert sample["number"] == number
            assert torch.equal(sample["x"], torch.from_numpy(content_of(number)))
        dataset.close()


@fast
def test_litdata_folders_that_would_run_code_or_number_otherwise_are_refused(tmp_path):
    def folder(**config):
        chunk = {"filename": "chunk-0-0.bin", "chunk_size": 3, "chunk_bytes": 9}
        (tmp_path / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
        return tmp_path

    with pytest.raises(ValueError, match="holds pickled values"):
        LitDataSource(folder(data_format=["int", "pickle"]))
    with pytest.raises(ValueError, match="is read by TokensLoader"):
        LitDataSource(folder(data_format=["int"], item_loader="TokensLoader"))
    with pytest.raises(ValueError, match="change which sample has which number"):
        LitDataSource(folder(data_format=["int"]), subsample=0.5)


# -- Hugging Face ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its tested release needs Python 3.11")
def test_huggingface_datasets_as_they_are_and_streams_by_their_files(tmp_path):
    import datasets
    from datasets.distributed import split_dataset_by_node

    paths = write_parquets(tmp_path / "files", [7, 5], rows=3)
    files = [str(path) for path in paths]
    options = {"data_files": files, "split": "train", "cache_dir": str(tmp_path / "cache")}
    stream = datasets.load_dataset("parquet", streaming=True, **options)
    dataset = ShardedDataset(from_huggingface(stream))
    rows = list(stream)
    assert len(dataset) == len(rows) == 12
    for number, row in enumerate(rows):
        assert dataset[number]["cls"] == row["cls"]
        assert np.allclose(dataset[number]["x"], row["x"])
    some = datasets.load_dataset("parquet", streaming=True, columns=["cls"], **options)
    assert list(ShardedDataset(from_huggingface(some))) == list(some), "the columns that the stream has"
    assert [row["cls"] for row in ShardedDataset(from_huggingface(stream.shard(2, 1)))] == [
        row["cls"] for row in rows[7:]
    ]
    resumed = datasets.load_dataset("parquet", streaming=True, **options)
    first = iter(resumed)
    next(first)
    resumed.load_state_dict(resumed.state_dict())
    cast = datasets.Features({**stream.features, "cls": datasets.Value("string")})
    for changed in (
        stream.map(lambda row: row), stream.shuffle(seed=0), stream.take(3), stream.filter(bool),
        stream.reshard(), stream.cast(cast), stream.with_format("numpy"), stream.select_columns(["cls"]),
        datasets.load_dataset("parquet", streaming=True, features=cast, **options), resumed,
        split_dataset_by_node(stream, 0, 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the stream was changed"):
            from_huggingface(changed)
    plain = datasets.load_dataset("parquet", **options)
    with pytest.raises(TypeError, match="is map-style: give it to the sampler or job as it is"):
        from_huggingface(plain)
    sampler = ElasticBatchSampler(plain, 2, 3, slots=range(2), tail="uneven")
    seen = [plain.__getitems__(batch) for batch in sampler]
    assert sorted(row["cls"] for batch in seen for row in batch) == sorted(row["cls"] for row in rows)
    with pytest.raises(TypeError, match="is iterable"):
        ElasticBatchSampler(stream, 2, 3, slots=())


@fast
def test_what_is_no_stream_of_theirs_is_refused():
    with pytest.raises(TypeError, match="list is map-style"):
        from_huggingface([1, 2])
    with pytest.raises(TypeError, match="object is no streaming dataset"):
        from_huggingface(object())


@fast
def test_a_release_of_datasets_that_hides_what_was_done_is_refused():
    stream = type("IterableDataset", (), {"__module__": "datasets.iterable_dataset"})()
    stream._ex_iterable = stream._shuffling = stream._distributed = None
    with pytest.raises(TypeError, match=r"has no _formatting, by which Phalanx sees"):
        from_huggingface(stream)
