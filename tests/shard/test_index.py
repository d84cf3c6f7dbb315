"""The index of a checkpoint: only a sound one is read, whatever lies in its place, and refusals are quick."""

from __future__ import annotations

import json
import random
import time
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from junk import changed, junk, long, quick, raw, torn
from phalanx import shard
from phalanx.comm import simulate
from phalanx.shard.files._index import BLOCK, CheckpointError, digest, parse_index
from phalanx.shard.layout import _tiling
from phalanx.shard.layout._boxes import Box
from phalanx.shard.layout._tiling import Intricate, find_fault
from shard.layouts import chunk, values

GOOD = {
    "version": 2,
    "files": {"a.safetensors": 100, "b.safetensors": 64},
    "tensors": {
        "w": {
            "dtype": "F32",
            "size": [4, 3],
            "shards": [
                {"offsets": [0, 0], "sizes": [2, 3], "file": "a.safetensors", "begin": 8, "sums": ["x"]},
                {"offsets": [2, 0], "sizes": [2, 3], "file": "b.safetensors", "begin": 8, "sums": ["y"]},
            ],
        },
        "e": {"dtype": "F32", "size": [0], "shards": []},
        "s": {
            "dtype": "I64",
            "size": [],
            "shards": [{"offsets": [], "sizes": [], "file": "a.safetensors", "begin": 92, "sums": ["z"]}],
        },
    },
}


def seal(inner) -> bytes:
    body = json.dumps(inner)
    return json.dumps({"checksum": digest(body.encode()), "body": body}).encode()


def read(data: bytes) -> None:
    """Either a sound index or CheckpointError."""
    try:
        index = parse_index(data, b"", "index.json")
    except CheckpointError:
        return
    for stored in index.tensors.values():
        torch.empty(stored.size, dtype=torch.uint8, device="meta")
        assert sum(piece.box.volume for piece in stored.shards) == torch.Size(stored.size).numel()
        assert all(piece.file in index.files for piece in stored.shards)


def fuzz(given_settings):
    @given_settings
    @given(st.one_of(changed(GOOD).map(seal), junk.map(seal), raw, torn(seal(GOOD)), changed(json.loads(seal(GOOD)))))
    def test(data) -> None:
        read(data if isinstance(data, bytes) else json.dumps(data).encode())

    return test


test_anything_in_the_place_of_an_index_is_refused_or_sound = pytest.mark.fast(fuzz(quick))
test_anything_in_the_place_of_an_index_many_times = pytest.mark.soak(fuzz(long))


@pytest.mark.fast
def test_the_good_one_is_read() -> None:
    assert set(parse_index(seal(GOOD), b"", "").tensors) == {"w", "e", "s"}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update(shards=[]), r"no shard holds the element at \[0, 0\]"),
        (lambda w: w["shards"].pop(), r"no shard holds the element at \[2, 0\]"),
        (lambda w: w["shards"].append(w["shards"][0]), r"shards overlap at \[0, 0\]"),
        (lambda w: w.update(size=[4, -3]), "a list of integers of at least 0"),
        (lambda w: w.update(size=["4", 3]), "a list of integers"),
        (lambda w: w.update(size=[2**62, 2**62, 0], shards=[]), "which no tensor has"),
        (lambda w: w.update(dtype="F99"), "unknown dtype 'F99'"),
        (lambda w: w.update(dtype=["F32"]), "expected text"),
        (lambda w: w["shards"][0].update(file="../secret"), "not among the files"),
        (lambda w: w["shards"][0].update(begin=90), "does not lie inside a.safetensors"),
        (lambda w: w["shards"][0].update(sums=[]), "does not lie inside a.safetensors"),
        (lambda w: w["shards"][0].update(quick=["00"] * 5), "has 5 quick sums for"),
        (lambda w: w["shards"][0].update(quick=[7]), "a list of texts"),
        (lambda w: w["shards"][0].update(offsets=[9, 0]), "lies outside of size"),
        (lambda w: w["shards"][0].update(offsets=[0]), "another number of dims"),
        (lambda w: w["shards"][0].pop("sums"), "has no field 'sums'"),
    ],
)
def test_what_is_wrong_is_named(change, message) -> None:
    inner = json.loads(json.dumps(GOOD))
    change(inner["tensors"]["w"])
    with pytest.raises(CheckpointError, match=message):
        parse_index(seal(inner), b"", "index.json")


@pytest.mark.fast
@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000, b"[]", b'{"body": 7}', b"", b'{"body": "\\ud800"}'])
def test_what_is_no_index_is_refused(tmp_path, data) -> None:
    (tmp_path / "index.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="is torn or no index"):
        shard.Checkpoint(tmp_path)


@pytest.mark.fast
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "index.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        shard.Checkpoint(tmp_path)
    simulate(1).run(lambda group: shard.save({"x": torch.ones(3)}, tmp_path / "one", process_group=group))
    (file,) = (tmp_path / "one").glob("rank*")
    size = file.stat().st_size
    file.unlink()
    file.mkdir()
    body = json.loads(json.loads((tmp_path / "one" / "index.json").read_text())["body"])
    body["files"][file.name] = file.stat().st_size
    assert body["tensors"]["x"]["shards"][0]["begin"] < size < file.stat().st_size
    (tmp_path / "one" / "index.json").write_bytes(seal(body))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*'x' needs it"):
        shard.Checkpoint(tmp_path / "one").read("x")


def index_of(boxes, size) -> bytes:
    shards = [
        {"offsets": list(b.offsets), "sizes": list(b.sizes), "file": "f", "begin": 0,
         "sums": [""] * -(-b.volume // BLOCK)}
        for b in boxes
    ]  # fmt: skip
    tensors = {"w": {"dtype": "U8", "size": list(size), "shards": shards}}
    return seal({"version": 2, "files": {"f": 2**40}, "tensors": tensors})


COUNT = 10_000
CRAFTED = {
    # Each of these kept every box in sight of every other, or cut what was left into ever more pieces.
    "staircase": ([Box((i, i), (COUNT - i, 1)) for i in range(COUNT)], (COUNT, COUNT)),
    "all the same": ([Box((0, 0), (1, 1))] * COUNT, (COUNT, COUNT)),
    "long and crossing at the end": (
        [*(Box((0, i), (COUNT, 1)) for i in range(COUNT - 1)), Box((COUNT - 1, 0), (1, COUNT))],
        (COUNT, COUNT),
    ),
    "with holes": ([Box((2 * i, 2 * i), (1, 1)) for i in range(COUNT)], (2 * COUNT, 2 * COUNT)),
    "nested": ([Box((i,), (2 * COUNT - 2 * i,)) for i in range(COUNT)], (2 * COUNT,)),
    "many dims": ([Box((0,) * 30, (1 + i % 2,) * 30) for i in range(COUNT)], (2,) * 30),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", CRAFTED)
def test_ten_thousand_crafted_shards_are_refused(case) -> None:
    """By work that grows with their number; the pairs of them alone would be fifty million."""
    boxes, size = CRAFTED[case]
    data = index_of(boxes, size)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"overlap|no shard holds"):
        parse_index(data, b"", "index.json")
    print(f"{case}: {time.process_time() - began:.2f} s")


@pytest.mark.fast
def test_ten_thousand_good_shards_are_read() -> None:
    rows = [Box((i, j), (1, 1)) for i, j in product(range(100), range(100))]
    assert len(parse_index(index_of(rows, (100, 100)), b"", "").tensors["w"].shards) == COUNT
    cut = random_cut(random.Random(3), Box.of_size((300, 300, 300)), COUNT)
    assert len(parse_index(index_of(cut, (300, 300, 300)), b"", "").tensors["w"].shards) == len(cut)


def random_cut(rng: random.Random, box: Box, count: int) -> list[Box]:
    """A box cut in two along any dim, and its halves again, until there are about so many."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if count < 2 or not dims:
        return [box]
    dim = rng.choice(dims)
    at = rng.randrange(1, box.sizes[dim])
    first = (*box.sizes[:dim], at, *box.sizes[dim + 1 :])
    offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
    second = (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :])
    return [
        *random_cut(rng, Box(box.offsets, first), count // 2),
        *random_cut(rng, Box(offsets, second), count - count // 2),
    ]


SIZES = (4, 3, 2)


@st.composite
def boxes(draw):
    offsets = tuple(draw(st.integers(0, n - 1)) for n in SIZES)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(SIZES, offsets, strict=True)))


@pytest.mark.fast
@settings(max_examples=100, deadline=None)
@given(st.lists(boxes(), max_size=6), st.integers(0, 1000), st.integers(0, 12))
def test_a_fault_is_found_exactly_where_a_point_is_not_held_once(extra, seed, count) -> None:
    """Against counting every element: a random tiling, with some boxes added or left out."""
    rng = random.Random(seed)
    several = [*random_cut(rng, Box.of_size(SIZES), count), *extra][: rng.randrange(1, 20)]
    held = {
        point: [i for i, box in enumerate(several) if _tiling._holds(box, point)]
        for point in product(*map(range, SIZES))
    }
    fault = find_fault(several, SIZES)
    assert (fault is None) == all(len(holders) == 1 for holders in held.values())
    if fault is not None:
        assert held[fault[0]] == fault[1]
        assert len(fault[1]) != 1


@pytest.mark.fast
def test_tensors_without_dims_or_elements() -> None:
    assert find_fault([Box((), ())], ()) is None
    assert find_fault([], ()) == ((), [])
    assert find_fault([Box((), ())] * 2, ()) == ((), [0, 1])
    assert find_fault([], (3, 0)) is None
    assert find_fault([Box((1, 0), (2, 0))], (3, 0)) is None


@pytest.mark.fast
def test_a_cut_that_would_take_for_ever_to_check_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(_tiling, "LEAST_WORK", 10)
    monkeypatch.setattr(_tiling, "WORK_PER_BOX", 1)
    with pytest.raises(Intricate):
        find_fault(random_cut(random.Random(1), Box.of_size((9, 9, 9)), 9), (9, 9, 9))


@pytest.mark.fast
def test_values_survive(tmp_path) -> None:
    """The checks of the index leave alone what save writes: uneven cuts, empty shards, no dims."""

    def main(group):
        state = {"w": chunk(3).shard(values(2, 3)), "s": torch.tensor(3.0), "n": torch.zeros(0, 4)}
        shard.save(state, tmp_path / "one", process_group=group)

    simulate(3).run(main)
    saved = shard.Checkpoint(tmp_path / "one")
    assert torch.equal(saved.read("w"), values(2, 3))
    assert saved.read("s").item() == 3.0
    assert saved.read("n").shape == (0, 4)
