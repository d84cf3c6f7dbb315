"""Tar files of the WebDataset format: the same samples as its own reader gives, from an index that is made once."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import random
import re
import shutil
import tarfile
import warnings

import pytest

from phalanx.data import ElasticBatchSampler, ShardedDataset
from phalanx.data.sources import NodeCache, TarSource
from phalanx.data.sources._tar_headers import NotPlain, fast_members, members, slow_members
from phalanx.data.sources._tar_index import IndexFolder
from sharded_samples import add, content_of, write_tars

pytestmark = pytest.mark.fast

LONG = "folder/" * 20 + "x" * 70
FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}
NAMES = [
    "plain.txt", "plain.json", "other.TXT", "a/b.c/d.e.f", "a/b.c/d.g", "noextension", "__meta__", "__info__/x.txt",
    "x/__meta__.txt", ".hidden", "dir/.hidden.txt", "two.tar.gz", "two.TAR", "ünïcode.txt", "sp ace.a b", "plain.again",
]  # fmt: skip


def write(path, names, form=tarfile.PAX_FORMAT, folders=True):
    with tarfile.open(path, "w", format=form) as archive:
        if folders:
            info = tarfile.TarInfo("folder")
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for number, name in enumerate(names):
            add(archive, name, bytes([number % 251]) * (number * 37 % 1400), mtime=number + 0.25)
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_the_fast_reader_finds_what_pythons_own_finds(tmp_path, form):
    names = [*NAMES, LONG + ".txt", "y" * 99 + ".b"] if form != "ustar" else [*NAMES, "long/" * 30 + "x.txt"]
    path = write(tmp_path / "a.tar", names, FORMATS[form])
    with path.open("rb") as file:
        assert list(fast_members(file)) == list(slow_members(file, "a.tar"))
        assert len(members(file, "a.tar")) == len(names)


def test_unusual_files_are_left_to_pythons_reader_and_broken_ones_named(tmp_path):
    """Global headers, links and large numbers: right, if slower. Sparse, cut off and foreign files: refused."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "to all"}) as archive:
        add(archive, "1.txt", b"one")
        link = tarfile.TarInfo("2.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "1.txt"
        archive.addfile(link)
        add(archive, "3.txt", b"three")
    with path.open("rb") as file:
        with pytest.raises(NotPlain):
            list(fast_members(file))
        assert [member.name for member in members(file, "a.tar")] == ["1.txt", "3.txt"]
    whole = write(tmp_path / "b.tar", ["1.txt", "22.bin", "33.txt"]).read_bytes()
    for cut in (100, 600, 1600):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        with (
            (tmp_path / "cut.tar").open("rb") as file,
            pytest.raises(ValueError, match=r"cut\.tar (cannot be read|is cut off)"),
        ):
            members(file, "cut.tar")
    (tmp_path / "foreign.tar").write_bytes(b"no tar file at all" * 100)
    with pytest.raises(ValueError, match=r"foreign\.tar cannot be read as a tar file"):
        TarSource([tmp_path / "foreign.tar"])
    header = bytearray(whole[:512])
    header[156:157] = b"S"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "sparse.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(ValueError, match=r"sparse\.tar: member folder/ is sparse"):
        TarSource([tmp_path / "sparse.tar"])


def test_neighbours_with_one_key_are_one_sample(tmp_path):
    source = TarSource([write(tmp_path / "a.tar", NAMES)])
    samples = ShardedDataset(source).__getitems__(range(int(source.sizes[0])))
    fields = [(sample["__key__"], sorted(sample.keys() - {"__key__"})) for sample in samples]
    assert fields == [
        ("plain", ["json", "txt"]), ("other", ["txt"]), ("a/b.c/d", ["e.f", "g"]), ("x/__meta__", ["txt"]),
        ("dir/", ["hidden.txt"]),
               ("two", ["tar", "tar.gz"]), ("ünïcode", ["txt"]), ("sp ace", ["a b"]), ("plain", ["again"]),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"double\.tar: sample '1' has two members for field 'txt'"):
        TarSource([write(tmp_path / "double.tar", ["1.txt", "1.TXT"])])


@pytest.mark.parametrize("seed", range(6))
def test_samples_are_those_of_webdataset(tmp_path, seed):
    """Sample by sample, bytes included, over random names, formats and several shards."""
    webdataset = pytest.importorskip("webdataset", reason="pip install -c constraints.txt webdataset")
    rng = random.Random(seed)
    paths = []
    for number, form in enumerate(FORMATS.values()):
        names = [name for name in NAMES if rng.random() < 0.8]
        for sample in range(rng.randint(0, 12)):
            key = rng.choice([f"{sample:04d}", f"dir.x/{sample}", "k" * rng.randint(1, 95), f"__{sample}__"])
            names += [
                f"{key}.{field}"
                for field in rng.sample(["jpg", "Cls", "seg.png", "json", "", "a/b", "__bad__"], rng.randint(1, 4))
            ]
        if form != tarfile.USTAR_FORMAT:
            names += [f"{LONG}{i}.{field}" for i in range(rng.randint(0, 3)) for field in ("a", "b")]
        if seed % 2:
            rng.shuffle(names)
        unique = list({(key_of(name), name.lower()): name for name in names}.values())
        paths.append(write(tmp_path / f"{number}.tar", unique, form, folders=seed % 3 == 0))
    source = TarSource(paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    ours = ShardedDataset(source)
    assert len(ours) == len(theirs)
    for index, expected in enumerate(theirs):
        wanted = {name: value for name, value in expected.items() if name not in ("__url__", "__local_path__")}
        assert ours[index] == wanted


def key_of(name):
    found = re.match(r"((?:.*/|)[^.]+)[.]", name)
    return found[1] if found else name


def test_an_index_is_made_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    paths = write_tars(tmp_path, [3, 0, 4])
    first = TarSource(paths)
    assert first.sizes.tolist() == [3, 0, 4]
    assert ShardedDataset(first)[5]["x"] == content_of(5).tobytes()
    made = []
    original = IndexFolder._make
    monkeypatch.setattr(IndexFolder, "_make", lambda self, number: made.append(number) or original(self, number))
    again = TarSource(paths)
    assert (again.fingerprints == first.fingerprints).all()
    again.open(2)
    assert made == []
    os.utime(paths[0])
    assert (TarSource(paths).fingerprints == first.fingerprints).all(), "a copy with another date is the same shard"
    assert made == [0]
    with tarfile.open(paths[2], "a") as archive:
        add(archive, "another.x", b"")
    with pytest.raises(ValueError, match=r"train-0002\.tar was changed while it was in use"):
        first.open(2)
    changed = TarSource(paths)
    assert made == [0, 2]
    assert (changed.fingerprints != first.fingerprints).tolist() == [False, False, True]
    index = next((tmp_path / ".phalanx-index").glob("train-0000*.index"))
    index.write_bytes(index.read_bytes()[:50])
    for summary in (tmp_path / ".phalanx-index").glob("summary*"):
        summary.unlink()
    assert TarSource(paths).sizes.tolist() == [3, 0, 5], "a damaged index is made anew"
    state = ElasticBatchSampler(ShardedDataset(first), 1, 2, slots=(), shuffle="shards").state_dict()
    with pytest.raises(ValueError, match=r"changed since then: train-0002\.tar"):
        ElasticBatchSampler(ShardedDataset(changed), 1, 2, slots=(), shuffle="shards").load_state_dict(state)


def index_all(paths, results):
    made = []
    original = IndexFolder._make

    def make(self, number):
        made.append(number)
        return original(self, number)

    IndexFolder._make = make
    source = TarSource(paths)
    results.put((made, source.sizes.tolist()))


def test_ranks_share_the_making_of_the_index(tmp_path):
    paths = write_tars(tmp_path, [2] * 12)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=index_all, args=(paths, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=100) for _ in ranks]
    for rank in ranks:
        rank.join(100)
    assert sorted(number for made, _ in found for number in made) == list(range(12)), "each once, by one of them"
    assert all(sizes == [2] * 12 for _, sizes in found)


def test_packed_and_distant_files_are_read_from_the_nodes_cache(tmp_path):
    paths = write_tars(tmp_path / "plain", [3, 2])
    packed = [tmp_path / f"{path.name}.gz" for path in paths]
    for path, target in zip(paths, packed, strict=True):
        target.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=r"tar\.gz must be unpacked to be read; give cache=NodeCache"):
        TarSource(packed)
    cache = NodeCache(tmp_path / "cache")
    ours = ShardedDataset(TarSource(packed, cache=cache))
    assert [ours[i]["x"] for i in range(5)] == [content_of(i).tobytes() for i in range(5)]
    fetched = []

    def fetch(name, target):
        fetched.append(name)
        shutil.copy(tmp_path / "plain" / name.removeprefix("far://"), target)

    names = [f"far://{path.name}" for path in paths]
    with pytest.raises(ValueError, match="fetch= brings files to this node; give cache="):
        TarSource(names, fetch=fetch)
    distant = TarSource(names, fetch=fetch, cache=NodeCache(tmp_path / "far", max_shards=4), index=tmp_path / "index")
    dataset = ShardedDataset(distant)
    assert dataset[4]["x"] == content_of(4).tobytes()
    assert sorted(fetched) == sorted(names), "each once"
    with pytest.raises(PermissionError, match="can be written to none of /proc/index; give index= a folder"):
        TarSource(paths, index="/proc/index")


def test_what_stands_between_the_fields_of_a_sample_is_not_read(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("1.a", b"one"), ("large", bytes(10**5)), ("1.b", b"two"), ("2.a", b""), ("2.b", b"x")):
            add(archive, name, content)
    dataset = ShardedDataset(TarSource([tmp_path / "a.tar"]))
    read = []
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, first: read.append(count) or original(file, count, first))
    assert dataset[0] == {"__key__": "1", "a": b"one", "b": b"two"}
    assert sum(read) == 6
    assert dataset[1] == {"__key__": "2", "a": b"", "b": b"x"}


def test_a_file_that_is_cut_while_it_is_open_is_named_when_it_is_read(tmp_path):
    (path,) = write_tars(tmp_path, [4])
    reader = TarSource([path]).open(0)
    with path.open("r+b") as file:
        file.truncate(1200)
    with pytest.raises(ValueError, match=r"train-0000\.tar: sample '000003' has 0 of "):
        reader.read([3])
