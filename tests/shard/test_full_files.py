"""Whole tensors in safetensors files that other tools write and read: slices in, one stream out, any layout."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx import shard
from phalanx.comm import init_device_mesh, simulate
from phalanx.errors import PhalanxError
from phalanx.shard.checkpoint._full_files import INDEX, SINGLE, FullFiles
from phalanx.shard.files import _safetensors
from phalanx.tensor import Partial, Replicate, Shard, StridedShard, distribute_tensor
from phalanx.tensor import Placement as P

pytestmark = pytest.mark.fast

LAYOUTS: list[tuple[tuple[int, ...], list[P]]] = [
    ((4,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 3), [StridedShard(1, split_factor=3), Shard(1)]),
    ((2, 2), [StridedShard(0, split_factor=2), Replicate()]),
    ((2, 2), [Replicate(), Shard(1)]),
]


def values() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    made = {f"layer.{n}.weight": torch.randn(7, 5 + n, generator=chance) for n in range(3)}
    return {**made, "half": torch.randn(6, 4, generator=chance).bfloat16(), "step": torch.tensor(12)}


def size_of(mesh: tuple[int, ...]) -> int:
    return torch.Size(mesh).numel()


def state_on(mesh_shape: tuple[int, ...], placements: list[P], whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    return {
        name: distribute_tensor(value, mesh, placements, src_data_rank=None) if value.dim() else value.clone()
        for name, value in whole.items()
    }


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
def test_any_layout_goes_out_and_comes_back(mesh: Any, placements: Any, tmp_path: Path) -> None:
    whole = values()

    def main(group: Any) -> list[bool]:
        state = state_on(mesh, placements, whole)
        shard.save_full(state, tmp_path / "out", max_file_bytes=200, max_bytes=64)
        shard.save(state, tmp_path / "cells")
        full = shard.gather_state_dict(state, 1 % group.size)
        if full is not None:
            assert all(torch.equal(full[name], value) for name, value in whole.items())
        same = []
        for place in ("out", "cells"):
            read = state_on(mesh, placements, {name: torch.zeros_like(value) for name, value in whole.items()})
            shard.load(tmp_path / place, read)
            same += [
                torch.equal(read[name].to_local() if value.dim() else read[name],
                            state[name].to_local() if value.dim() else value)
                for name, value in whole.items()
            ]  # fmt: skip
        return same

    assert all(all(same) for same in simulate(size_of(mesh)).run(main))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in whole.values())
    found = {n: t for path in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(path).items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert not list(tmp_path.glob("*.partial"))


def test_a_rank_reads_only_what_it_holds(tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 32), "other": torch.randn(100)}, tmp_path / SINGLE)

    def main(group: Any) -> tuple[int, bool]:
        mesh = init_device_mesh("cpu", (4,))
        target = distribute_tensor(torch.zeros(64, 32, dtype=torch.float64), mesh, [Shard(0)], src_data_rank=None)
        files = FullFiles(tmp_path)
        for box in target._held_boxes("load"):
            files.fill("w", box.tensor, shard.checkpoint._full_files.Box(box.offsets, box.sizes))
        shard.load(tmp_path / SINGLE, {"w": target})  # the file itself, and another dtype
        mine = load_file(tmp_path / SINGLE)["w"].chunk(4)[group.rank].double()
        return files.bytes_read, torch.equal(target.to_local(), mine)

    assert simulate(4).run(main) == [(64 * 32, True)] * 4


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": {"w": "../secret.safetensors"}}', "not a file beside it"),
        ('{"weight_map": {"w": 3}}', "weight_map"),
        ('{"weight_map": {"w": "none.safetensors"}}', "none.safetensors cannot be read"),
        ('{"weight_map": {"w": "junk.safetensors"}}', "junk.safetensors cannot be read"),
        ('{"weight_map": {"w": "good.safetensors"}}', "has no tensor 'w'"),
    ],
)
def test_whatever_lies_there_is_an_error_by_name(index: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    (tmp_path / "junk.safetensors").write_bytes(os.urandom(300))
    save_file({"v": torch.ones(2)}, tmp_path / "good.safetensors")
    with pytest.raises(shard.CheckpointError, match=message):
        shard.load(tmp_path, {"w": torch.zeros(2)})


def test_missing_names_and_other_sizes_are_told(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / SINGLE)
    with pytest.raises(KeyError, match="no tensor 'u'"):
        shard.load(tmp_path, {"u": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'w' has size \(2,\).*target \(3,\)"):
        shard.load(tmp_path, {"w": torch.zeros(3)})
    left = torch.zeros(2)
    shard.load(tmp_path, {"u": left}, strict=False)
    assert not left.any()


def test_a_full_disk_is_heard_of_on_all_ranks_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_safetensors.os, "posix_fallocate", full)

    def main(group: Any) -> str:
        state = state_on((2,), [Shard(0)], values())
        with pytest.raises(shard.CheckpointError) as error:
            shard.save_full(state, tmp_path / "out")
        return str(error.value)

    told = simulate(2).run(main)
    assert told[0] == told[1]
    assert "rank 0: OSError" in told[0]
    assert "No space left" in told[0]
    assert not list(tmp_path.iterdir())


def test_an_old_one_is_replaced_only_when_asked(tmp_path: Path) -> None:
    def main(group: Any) -> None:
        state = state_on((2,), [Shard(0)], values())
        shard.save_full(state, tmp_path / "out")
        with pytest.raises(shard.CheckpointError, match="overwrite=True"):
            shard.save_full(state, tmp_path / "out")
        shard.save_full({"w": state["half"]}, tmp_path / "out", overwrite=True)

    simulate(2).run(main)
    assert list(load_file(tmp_path / "out" / SINGLE)) == ["w"]


def test_what_is_no_tensor_or_no_value_yet_is_refused(tmp_path: Path) -> None:
    def main(group: Any) -> None:
        mesh = init_device_mesh("cpu", (2,))
        partial = distribute_tensor(torch.ones(2), mesh, [Replicate()], src_data_rank=None).redistribute(
            placements=[Partial()]
        )
        for state in ({"w": partial}, {"n": 3}):
            for save in (shard.save_full, shard.save):
                with pytest.raises((ValueError, TypeError, PhalanxError), match=r"P\(sum\)|partial|is a int"):
                    save(state, tmp_path / "out")

    simulate(2).run(main)
