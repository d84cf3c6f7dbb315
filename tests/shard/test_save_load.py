"""Checkpoints: saved under one layout, loaded under any other; damage is found and named."""

from __future__ import annotations

import json
import os
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from phalanx import shard
from phalanx._signature import sign
from phalanx.comm import init_device_mesh, observe, simulate
from phalanx.errors import RankFailed
from phalanx.shard.checkpoint._checkpoint import runs
from phalanx.shard.files import _safetensors
from phalanx.shard.files._index import BLOCK, digest
from phalanx.shard.layout._boxes import Box
from phalanx.tensor import Replicate, Shard, distribute_tensor
from shard.layouts import chunk, gathered, grid, random_specs, values

pytestmark = pytest.mark.fast


def run(num_ranks, function, *args):
    try:
        return simulate(num_ranks).run(function, *args)
    except RankFailed as failed:
        raise failed.__cause__ from None


def save_one(path, whole, spec, num_ranks, **options):
    def main(group):
        tensor = shard._shard_tensor(whole, spec, verify=False)
        shard.save({"layer.weight": tensor, "step": torch.tensor(7)}, path, **options)

    run(num_ranks, main)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_layout_is_loaded_from_any_other(tmp_path_factory, data) -> None:
    sizes = data.draw(st.sampled_from([(6, 5), (7,), (2, 3, 4), (0, 3)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64]))
    saved, loaded = data.draw(random_specs(sizes, 3)), data.draw(random_specs(sizes, 2))
    path, whole = tmp_path_factory.mktemp("save") / "one", values(*sizes, dtype=dtype)
    save_one(path, whole, saved, 3)

    def main(group):
        step = torch.tensor(0)
        tensor = shard.zeros(loaded, sizes, dtype=dtype)
        shard.load(path, {"layer.weight": tensor, "step": step}, process_group=group)
        assert step == 7
        assert torch.equal(shard.Checkpoint(path).load("layer.weight", loaded), tensor)
        return gathered(tensor)

    assert torch.equal(run(2, main)[0], whole)
    assert torch.equal(shard.Checkpoint(path).read("layer.weight"), whole)


def test_files_are_plain_safetensors(tmp_path) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    first = load_file(tmp_path / "one" / "rank-00000-of-00002.safetensors")
    assert sorted(first) == ["layer.weight/0", "step/1"]
    assert torch.equal(first["layer.weight/0"], values(4, 3)[:2])
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "index.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["one"], "nothing else is left"


def test_only_the_needed_ranges_are_read(tmp_path) -> None:
    rows = 64
    whole = values(rows, 1 << 16)  # 256 KB per row: four rows are a block of the checksums
    save_one(tmp_path / "one", whole, chunk(2), 2)
    saved = shard.Checkpoint(tmp_path / "one")
    part = saved.read("layer.weight", Box((40, 0), (4, 1 << 16)))
    assert torch.equal(part, whole[40:44])
    assert saved.bytes_read == 1 << 20
    saved.read("layer.weight", Box((41, 5), (1, 7)))
    assert saved.bytes_read == 1 << 20, "a block is checked once"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_are_the_bytes_of_the_part(data) -> None:
    whole = Box((2, 3, 1), (3, 4, 2))
    low = [data.draw(st.integers(0, n - 1)) for n in whole.sizes]
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(whole.sizes, low, strict=True))
    part = Box(tuple(o + w for o, w in zip(low, whole.offsets, strict=True)), sizes)
    numbers = torch.arange(24).reshape(whole.sizes)
    wanted = numbers[low[0] : low[0] + sizes[0], low[1] : low[1] + sizes[1], low[2] : low[2] + sizes[2]]
    found = [n for begin, end in runs(part, whole, 4) for n in range(begin // 4, end // 4)]
    assert found == wanted.flatten().tolist()


def test_dtensors_are_saved_and_loaded_alike(tmp_path) -> None:
    whole = values(6, 4)

    def save(group):
        mesh = init_device_mesh("cpu", (2, 2))
        state = {
            "cut": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
            "copied": distribute_tensor(whole * 2, mesh, [Replicate(), Shard(0)]),
        }
        shard.save(state, tmp_path / "one")

    def load(group):
        mesh = init_device_mesh("cpu", (3,))
        state = {
            "cut": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]),
            "copied": distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()]),
        }
        shard.load(tmp_path / "one", state)
        again = shard.zeros(chunk(3), 6, 4)
        shard.load(tmp_path / "one", {"cut": again})
        return state["cut"].full_tensor(), state["copied"].to_local(), gathered(again)

    run(4, save)
    results = run(3, load)
    for cut, copied, _ in results:
        assert torch.equal(cut, whole)
        assert torch.equal(copied, whole * 2)
    assert torch.equal(results[0][2], whole)


def test_an_existing_checkpoint_is_only_replaced_on_request(tmp_path) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    with pytest.raises(shard.CheckpointError, match=r"rank 0: FileExistsError.*overwrite=True"):
        save_one(tmp_path / "one", values(4, 3) + 1, chunk(2), 2)
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight"), values(4, 3))
    save_one(tmp_path / "one", values(4, 3) + 1, chunk(3, 1), 3, overwrite=True)
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight"), values(4, 3) + 1)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_leaves_nothing(tmp_path) -> None:
    def main(group):
        odd = torch.empty(2, dtype=torch.complex128) if group.rank == 1 else torch.empty(2)
        part = shard.Shard.from_tensor_and_offsets(
            odd.real.contiguous() if group.rank == 0 else odd, [2 * group.rank], group.rank
        )
        whole = shard.ones(chunk(2), 4)
        whole._local_shards = [part]
        with pytest.raises(shard.CheckpointError, match=r"rank 1: ValueError: x/0: torch.complex128"):
            shard.save({"x": whole}, tmp_path / "one")

    run(2, main)
    assert list(tmp_path.iterdir()) == []


def test_ranks_must_save_the_same_names(tmp_path) -> None:
    def main(group):
        shard.save({f"x{group.rank}": torch.ones(2)}, tmp_path / "one")

    with pytest.raises(shard.CheckpointError, match="rank 1 saves other tensors than rank 0"):
        run(2, main)
    with pytest.raises(shard.CheckpointError, match="'x' is a int"):
        run(1, lambda group: shard.save({"x": 3}, tmp_path / "one"))
    assert list(tmp_path.iterdir()) == []


def damage(folder, case):
    file = folder / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    if case == "missing":
        file.unlink()
    elif case == "torn":
        file.write_bytes(data[:-1])
    elif case == "tampered":
        data[-1] ^= 1
        file.write_bytes(data)
    elif case == "no index":
        (folder / "index.json").unlink()
    elif case == "torn index":
        text = (folder / "index.json").read_text()
        (folder / "index.json").write_text(text[: len(text) // 2])
    elif case == "changed index":
        outer = json.loads((folder / "index.json").read_text())
        outer["body"] = outer["body"].replace("rank-00001", "rank-00000")
        (folder / "index.json").write_text(json.dumps(outer))
    elif case == "swapped blocks":
        file.write_bytes(data[: -2 * BLOCK] + data[-BLOCK:] + data[-2 * BLOCK : -BLOCK])
    elif case == "forged checksum":  # a CRC could be made to fit again; here the last four bytes are chosen so
        wanted = zlib.crc32(data[-24:])
        data[-24] ^= 1
        file.write_bytes(data[:-4] + fitting_end(bytes(data[-24:-4]), wanted))


def fitting_end(start, wanted):
    """Four bytes after which the CRC is as wanted: each of their bits flips fixed bits of it, so solve for the bits."""
    empty = zlib.crc32(start + bytes(4))
    rest, chosen = empty ^ wanted, 0
    rows = [(zlib.crc32(start + (1 << bit).to_bytes(4, "little")) ^ empty, 1 << bit) for bit in range(32)]
    for bit in range(32):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows.remove(pivot)
        rows = [(r[0] ^ pivot[0], r[1] ^ pivot[1]) if r[0] >> bit & 1 else r for r in rows]
        if rest >> bit & 1:
            rest, chosen = rest ^ pivot[0], chosen ^ pivot[1]
    return chosen.to_bytes(4, "little")


def rewrite(folder, secret=None):
    """Change a byte of a file and make the index fit again, as someone would who knows the format."""
    file = folder / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    outer = json.loads((folder / "index.json").read_text())
    inner = json.loads(outer["body"])
    stored = inner["tensors"]["layer.weight"]["shards"][1]
    stored["sums"] = [digest(data[stored["begin"] :])]
    outer["body"] = json.dumps(inner)
    outer["checksum"] = digest(outer["body"].encode())
    if secret is not None:
        outer["mac"] = sign(secret, outer["body"])
    (folder / "index.json").write_text(json.dumps(outer))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", r"rank-00001-of-00002.safetensors is missing; 'layer.weight' needs it"),
        ("torn", r"is torn: it has \d+ bytes, the index says \d+; 'layer.weight' needs it"),
        ("tampered", r"'layer.weight' is damaged: bytes \d+ to \d+"),
        ("no index", "no checkpoint at"),
        ("torn index", "is torn or no index"),
        ("changed index", "was changed after it was written"),
    ],
)
def test_damage_is_found_and_named(tmp_path, case, message) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    damage(tmp_path / "one", case)
    with pytest.raises(shard.CheckpointError, match=message):
        shard.load(tmp_path / "one", {"layer.weight": torch.zeros(4, 3)})


def test_a_forged_crc_does_not_pass(tmp_path) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    file = tmp_path / "one" / "rank-00001-of-00002.safetensors"
    before = file.read_bytes()
    damage(tmp_path / "one", "forged checksum")
    after = file.read_bytes()
    assert after != before
    assert zlib.crc32(after[-24:]) == zlib.crc32(before[-24:]), "what this test is about"
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "one", {"layer.weight": torch.zeros(4, 3)})


def test_swapped_blocks_are_found_by_whoever_reads_them(tmp_path) -> None:
    whole = values(16, 1 << 17)  # 512 KB per row: two rows are a block
    save_one(tmp_path / "one", whole, chunk(2), 2)
    damage(tmp_path / "one", "swapped blocks")
    saved = shard.Checkpoint(tmp_path / "one")
    assert torch.equal(saved.read("layer.weight", Box((8, 0), (4, 1 << 17))), whole[8:12])
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        saved.read("layer.weight", Box((13, 0), (1, 4)))
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "one", {"layer.weight": torch.zeros(16, 1 << 17)})


def test_with_a_secret_a_rewritten_checkpoint_is_found(tmp_path) -> None:
    state = {"layer.weight": torch.zeros(4, 3)}
    for name, secret in (("plain", b""), ("signed", b"word"), ("stripped", b"word"), ("other", b"word")):
        save_one(tmp_path / name, values(4, 3), chunk(2), 2, secret=secret)
        shard.load(tmp_path / name, state, secret=secret)
        assert torch.equal(state["layer.weight"], values(4, 3))
    shard.load(tmp_path / "signed", state, secret=b"")  # damage is found without the secret too
    with pytest.raises(shard.CheckpointError, match=r"is not signed, but there is a secret; .*secret=b"):
        shard.Checkpoint(tmp_path / "plain", secret=b"word")
    with pytest.raises(shard.CheckpointError, match="another secret"):
        shard.Checkpoint(tmp_path / "signed", secret=b"other word")
    rewrite(tmp_path / "signed")
    with pytest.raises(shard.CheckpointError, match="was tampered with"):
        shard.load(tmp_path / "signed", state, secret=b"word")
    rewrite(tmp_path / "other", b"guessed")
    with pytest.raises(shard.CheckpointError, match="was tampered with"):
        shard.load(tmp_path / "other", state, secret=b"word")
    outer = json.loads((tmp_path / "stripped" / "index.json").read_text())
    del outer["mac"]
    (tmp_path / "stripped" / "index.json").write_text(json.dumps(outer))
    with pytest.raises(shard.CheckpointError, match="is not signed"):
        shard.load(tmp_path / "stripped", state, secret=b"word")


def test_only_without_a_secret_does_a_quick_sum_take_the_place_of_a_digest(tmp_path, monkeypatch) -> None:
    """Its sum is taken away from one that has it, as older releases and processes without xxhash leave it out."""
    state = {"layer.weight": torch.zeros(4, 3)}
    for name, field, secret in (("quick", "quick", b""), ("digest", "sums", b""), ("signed", "quick", b"word")):
        save_one(tmp_path / name, values(4, 3), chunk(2), 2, secret=secret)
        spoil(tmp_path / name, field, secret)
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "quick", state)
    shard.load(tmp_path / "quick", state, verify="full")
    shard.load(tmp_path / "signed", state, secret=b"word")
    shard.load(tmp_path / "digest", state)
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "digest", state, verify="full")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "digest", state)
    save_one(tmp_path / "without", values(4, 3), chunk(2), 2)
    monkeypatch.undo()
    assert stored_in(tmp_path / "without")["quick"] == []
    shard.load(tmp_path / "without", state)
    assert torch.equal(state["layer.weight"], values(4, 3))
    damage(tmp_path / "without", "tampered")
    with pytest.raises(shard.CheckpointError, match=r"'layer.weight' is damaged"):
        shard.load(tmp_path / "without", state)


def stored_in(folder):
    return json.loads(json.loads((folder / "index.json").read_text())["body"])["tensors"]["layer.weight"]["shards"][1]


def spoil(folder, field, secret):
    """Give a block another sum, in an index that is right otherwise."""
    inner = json.loads(json.loads((folder / "index.json").read_text())["body"])
    inner["tensors"]["layer.weight"]["shards"][1][field] = ["0" * 32]
    body = json.dumps(inner)
    outer = {"checksum": digest(body.encode()), "body": body}
    (folder / "index.json").write_text(json.dumps({**outer, "mac": sign(secret, body)} if secret else outer))


def test_the_secret_is_the_environments_unless_given(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PHALANX_CHECKPOINT_SECRET", "word")
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    shard.Checkpoint(tmp_path / "one")
    shard.Checkpoint(tmp_path / "one", secret=b"word")
    monkeypatch.setenv("PHALANX_CHECKPOINT_SECRET", "another")
    with pytest.raises(shard.CheckpointError, match="another secret"):
        shard.Checkpoint(tmp_path / "one")
    monkeypatch.delenv("PHALANX_CHECKPOINT_SECRET")
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight"), values(4, 3))


def test_what_is_not_needed_is_not_looked_at(tmp_path) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    damage(tmp_path / "one", "missing")
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight", Box((0, 0), (2, 3))), values(4, 3)[:2])


def test_wrong_names_and_sizes_are_refused(tmp_path) -> None:
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    with pytest.raises(KeyError, match="no tensor 'other'"):
        shard.load(tmp_path / "one", {"other": torch.zeros(1)})
    shard.load(tmp_path / "one", {"other": torch.zeros(1)}, strict=False)
    with pytest.raises(ValueError, match=r"has size \(4, 3\)"):
        shard.load(tmp_path / "one", {"layer.weight": torch.zeros(4, 4)})
    assert shard.Checkpoint(tmp_path / "one").names() == ["layer.weight", "step"]


def test_files_and_folders_are_on_the_disk_before_their_names_change(tmp_path, monkeypatch) -> None:
    """The order of what survives a power cut: data, index, the folder's names, the new name, its parent."""
    done, real_sync, real_rename = [], os.fsync, os.rename

    def sync(fd):
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_sync(fd)

    def rename(source, target):
        done.append(f"{Path(source).name} -> {Path(target).name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2)
    first = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(done[:2]) == first
    assert done[2:] == ["index.json", "one.partial", "one.partial -> one", tmp_path.name]
    done.clear()
    save_one(tmp_path / "one", values(4, 3), chunk(2), 2, overwrite=True)
    assert done[2:] == [
        "index.json",
        "one.partial",
        "one -> one.old",
        "one.partial -> one",
        tmp_path.name,
    ]


def test_large_shards_are_handed_to_the_disk_early_and_come_back(tmp_path, monkeypatch) -> None:
    from phalanx.shard.checkpoint import _save

    started, whole = [], torch.arange(9 << 18, dtype=torch.int64).view(9, -1)  # 18 MB
    real = _save.start_writing
    monkeypatch.setattr(_save, "start_writing", lambda *call: (started.append(call[1:]), real(*call)))
    save_one(tmp_path / "one", whole, chunk(1), 1)
    assert len(started) == 4
    assert started[0][0] == 0
    assert all(begin + count == after for (begin, count), (after, _) in pairwise(started))
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight"), whole)


def test_saving_works_where_the_disk_cannot_be_told_early(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_safetensors, "_sync_file_range", lambda: None)
    whole = torch.arange(5 << 20, dtype=torch.uint8).view(5, -1)
    save_one(tmp_path / "one", whole, chunk(1), 1)
    assert torch.equal(shard.Checkpoint(tmp_path / "one").read("layer.weight"), whole)


def test_saving_many_tensors_costs_a_fixed_number_of_collectives(tmp_path) -> None:
    def main(group):
        state = {f"p{i}": shard.ones(grid((4, 4)), 4, 4) for i in range(50)}
        events = []
        with observe(lambda event: events.append(event.name)):
            shard.save(state, tmp_path / "one", sync=False)
        return len(events)

    assert run(4, main) == [4] * 4
