"""Saves that several workers write together: complete or absent, read at any number of workers and without sharding."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_training import make_job, train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from phalanx.comm import simulate
from phalanx.elastic import RunOptions, SaveError, Saves
from phalanx.elastic.checkpoint import _cell_saves, _save_folder, _saves
from phalanx.elastic.checkpoint._cell_saves import CellSnapshot, agree_on_save, write_cells
from phalanx.elastic.checkpoint._save_folder import find_save, write_save
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.elastic.checkpoint._saves import check_save, read_manifest
from phalanx.elastic.checkpoint._state import State, digest
from phalanx.elastic.checkpoint._state_codec import encode
from phalanx.elastic.checkpoint._tensor_files import TensorRange
from phalanx.elastic.checkpoint._tensor_names import optimizer_name, tensor_names

pytestmark = pytest.mark.fast

SHAPES = {"layers.0.weight": (40, 25), "layers.0.bias": (40,), "norm": ()}


def full_state(step: int = 4) -> State:
    """As ``Job.state_dict`` has it, all in one place."""
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    moments = {
        number: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(shape)}
        for number, shape in enumerate(SHAPES.values())
    }
    parts = {
        "model": model,
        "buffers": {"mask": torch.ones(3, dtype=torch.bool)},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]},
        "others": {},
    }
    return {"parts": parts, "loss": 0.5, "sampler": {"step": step}}


def sharded(state: State, num_workers: int, seed: int = 0) -> tuple[State, list[list[TensorRange]]]:
    """The same with its large tensors elsewhere, and what each worker owns of them."""
    owned: list[list[TensorRange]] = [[] for _ in range(num_workers)]
    generator = torch.Generator().manual_seed(seed)

    def give_away(name: str, tensor: torch.Tensor) -> torch.Tensor:
        cuts = sorted({0, tensor.numel(), *torch.randint(0, tensor.numel() + 1, (4,), generator=generator).tolist()})
        for begin, end in itertools.pairwise(cuts):
            owner = int(torch.randint(num_workers, (1,), generator=generator))
            values = tensor.reshape(-1)[begin:end]
            owned[owner].append(TensorRange(name, tuple(tensor.shape), begin, end, values))
        return torch.empty_like(tensor, device="meta")

    parts = state["parts"]
    model = {name: give_away(name, tensor) for name, tensor in parts["model"].items()}
    moments = {
        number: {**known, "exp_avg": give_away(optimizer_name(number, "exp_avg"), known["exp_avg"])}
        for number, known in parts["optimizer"]["state"].items()
    }
    optimizer = {**parts["optimizer"], "state": moments}
    return {**state, "parts": {**parts, "model": model, "optimizer": optimizer}}, owned


def snapshots(state: State, num_workers: int, step: int = 4, key: str = "1.0", seed: int = 0) -> list[CellSnapshot]:
    small, owned = sharded(state, num_workers, seed)
    return [
        CellSnapshot.take(step, small, ranges, number=number, count=num_workers, key=key)
        for number, ranges in enumerate(owned)
    ]


def write_all(directory: Path, state: State, num_workers: int = 3, step: int = 4, **keywords: Any) -> Path:
    first, *others = snapshots(state, num_workers, step)
    for one in others:
        assert write_cells(directory, one, keep=2, **keywords) is None
    path = write_cells(directory, first, keep=2, **keywords)
    assert path is not None
    return path


def state_of(path: Path, secret: bytes = b"") -> Any:
    return check_save(path, secret).state()


@settings(max_examples=15)
@given(num_workers=st.integers(1, 8), seed=st.integers(0, 999))
def test_a_save_by_any_workers_is_the_state_and_is_read_in_any_ranges(
    tmp_path_factory: pytest.TempPathFactory, num_workers: int, seed: int
) -> None:
    state = full_state()
    directory = tmp_path_factory.mktemp("saves")
    first, *others = snapshots(state, num_workers, seed=seed)
    for one in others:
        write_cells(directory, one, keep=2)
    path = write_cells(directory, first, keep=2)
    assert path is not None
    assert not list(directory.glob(".partial*"))
    assert digest(state_of(path)) == digest(state)
    manifest = check_save(path)
    weight = state["parts"]["model"]["layers.0.weight"].view(-1)
    with manifest.open() as files:
        for begin, end in ((0, 1000), (seed, seed + 1), (seed // 2, min(1000, seed + 30)), (7, 7)):
            assert torch.equal(files.read("layers.0.weight", begin, end), weight[begin:end])
        assert torch.equal(files.read("norm", 0, 1), state["parts"]["model"]["norm"].view(1))
    small = manifest.state(lambda name: name.startswith(("layers", "norm")) or name.endswith("exp_avg"))
    assert small["parts"]["model"]["layers.0.weight"].is_meta
    assert small["parts"]["model"]["layers.0.weight"].shape == (40, 25)
    assert torch.equal(small["parts"]["buffers"]["mask"], state["parts"]["buffers"]["mask"])


def test_one_worker_with_everything_writes_a_file_that_other_tools_read(tmp_path: Path) -> None:
    state = full_state()
    path = write_save(tmp_path, 4, *encode(state), keep=2)
    assert digest(state_of(path)) == digest(state)
    found = load_file(path / "tensors.safetensors")
    assert torch.equal(found["layers.0.weight"], state["parts"]["model"]["layers.0.weight"])
    assert torch.equal(found["optimizer.state.1.exp_avg"], state["parts"]["optimizer"]["state"][1]["exp_avg"])
    with read_manifest(path).open() as files:
        for begin, end in ((0, 1000), (30, 70), (999, 1000)):
            expected = state["parts"]["model"]["layers.0.weight"].view(-1)[begin:end]
            assert torch.equal(files.read("layers.0.weight", begin, end), expected), "rows that are cut"


def test_a_jobs_save_holds_its_model_under_its_names(tmp_path: Path) -> None:
    job = make_job(saves=Saves(directory=tmp_path), run=RunOptions(progress=False))
    train(job, max_steps=2)
    job.save()
    found = load_file(next(tmp_path.glob("step-*")) / "tensors.safetensors")
    for name, value in job.model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_saves_of_the_first_format_are_still_read(tmp_path: Path) -> None:
    state = full_state()
    tree, tensors = encode(state)
    folder = tmp_path / "step-000000000004"
    folder.mkdir()
    save_file({f"{i:06d}": tensor.contiguous() for i, tensor in enumerate(tensors)}, folder / "tensors.safetensors")
    checksum = _saves.hash_file(folder / "tensors.safetensors")
    body = {"format": 1, "step": 4, "num_tensors": len(tensors), "tensors": checksum, "tree": tree}
    _saves.write_sealed(folder / "state.json", body, b"")
    assert digest(state_of(folder)) == digest(state)
    with read_manifest(folder).open() as files:
        expected = state["parts"]["model"]["layers.0.weight"].view(-1)[100:300]
        assert torch.equal(files.read("layers.0.weight", 100, 300), expected), "by the names that it would have now"
    (folder / "tensors.safetensors").write_bytes(b"torn")
    with pytest.raises(SaveError, match="does not match its checksum"):
        check_save(folder)


def test_a_worker_that_is_killed_leaves_no_save_and_the_older_one_is_taken(tmp_path: Path) -> None:
    write_all(tmp_path, full_state(), step=2)
    first, second, _lost = snapshots(full_state(), 3)
    write_cells(tmp_path, second, keep=2)
    with pytest.raises(TimeoutError, match=r"workers \[2\] of 3 are not in .*lost or slow, or the directory is not on"):
        write_cells(tmp_path, first, keep=2, patience=0.02)
    found, problems = find_save(tmp_path)
    assert found is not None
    assert (found.step, problems) == (2, []), "what has no manifest is no save"
    assert list(tmp_path.glob(".partial*"))
    write_all(tmp_path, full_state(), step=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000002", "step-000000000006"]


@pytest.mark.parametrize("damage", ["gone", "flip", "swapped"])
def test_a_save_without_one_of_its_files_is_not_readable(tmp_path: Path, damage: str) -> None:
    write_all(tmp_path, full_state(), step=2)
    path = write_all(tmp_path, full_state(), step=4)
    file = path / "tensors-00002-of-00003.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage == "flip":
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    else:
        file.write_bytes((path / "tensors-00003-of-00003.safetensors").read_bytes())
    with pytest.raises(SaveError, match="tensors-00002-of-00003"):
        check_save(path)
    found, problems = find_save(tmp_path)
    assert found is not None
    assert found.step == 2
    assert len(problems) == 1


def test_a_full_disk_on_one_worker_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = full_state()
    first, second = snapshots(state, 2)
    real, is_full = _cell_saves.write_tensor_file, [True]

    def write_unless_full(path: Path, ranges: Any, **keywords: bool) -> Any:
        if is_full[0]:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, ranges, **keywords)

    monkeypatch.setattr(_cell_saves, "write_tensor_file", write_unless_full)
    failed: list[str] = []
    saved: list[int] = []
    writers = [
        SaveWriter(
            tmp_path,
            keep=2,
            on_saved=lambda step, path: saved.append(step),
            on_failed=lambda step, error, delay: failed.append(str(error)),
        )
        for _ in range(2)
    ]
    writers[1].submit(second)
    with pytest.raises(OSError, match="No space left"):
        writers[1].wait_idle()
    is_full[0] = False
    writers[1].wait_idle()
    writers[0].submit(first)
    writers[0].wait_idle()
    for writer in writers:
        writer.close()
    assert failed
    assert saved == [4]
    assert digest(state_of(tmp_path / "step-000000000004")) == digest(state)


def test_what_fails_after_the_manifest_is_finished_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = full_state()
    first, second = snapshots(state, 2)
    write_cells(tmp_path, second, keep=2)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(_save_folder, "_put_in_place", fail)
        with pytest.raises(OSError, match="no"):
            write_cells(tmp_path, first, keep=2)
    path = write_cells(tmp_path, first, keep=2, patience=0.0)
    assert path is not None
    assert digest(state_of(path)) == digest(state)


def test_a_save_that_nobody_wants_any_more_is_given_up(tmp_path: Path) -> None:
    first, second, third = snapshots(full_state(), 3)
    writer = SaveWriter(tmp_path, keep=2, on_saved=lambda step, path: None)
    writer.submit(first)
    writer.give_up()
    writer.wait_idle()
    assert not list(tmp_path.iterdir())
    folder = tmp_path / ".partial-4-shared-1.0"
    real = _cell_saves.write_tensor_file

    def write_where_nothing_is(path: Path, ranges: Any, **keywords: bool) -> Any:
        folder.rmdir()
        return real(path, ranges, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cell_saves, "write_tensor_file", write_where_nothing_is)
        assert write_cells(tmp_path, second, keep=2) is None, "its folder was removed meanwhile"
    assert not list(tmp_path.iterdir())
    newer, *_ = snapshots(full_state(6), 3, step=6)
    writer.submit(first)
    writer.submit(newer)  # replaces it, also while it waits for the others
    writer.give_up()
    writer.close()
    write_cells(tmp_path, third, keep=2)
    assert write_cells(tmp_path, first, keep=2, is_unwanted=lambda: True) is None
    assert not list(tmp_path.iterdir())


def test_a_slow_first_worker_leaves_the_folder_of_a_later_step_alone(tmp_path: Path) -> None:
    early, late = full_state(4), full_state(6)
    first, second = snapshots(early, 2)
    later = snapshots(late, 2, step=6)
    (tmp_path / ".partial-9-shared-0.3").mkdir()
    write_cells(tmp_path, second, keep=2)
    write_cells(tmp_path, later[1], keep=2)
    assert write_cells(tmp_path, first, keep=2) is not None
    assert write_cells(tmp_path, later[0], keep=2, patience=0.0) is not None
    assert not (tmp_path / ".partial-9-shared-0.3").exists(), "that of another group is left over"
    assert digest(state_of(tmp_path / "step-000000000006")) == digest(late)


def test_saves_are_signed_with_all_their_files(tmp_path: Path) -> None:
    state = full_state()
    path = write_all(tmp_path, state, secret=b"secret")
    assert digest(state_of(path, b"secret")) == digest(state)
    with pytest.raises(SaveError, match="another secret"):
        check_save(path, b"another")
    first, second = snapshots(state, 2, step=5)
    write_cells(tmp_path, second, keep=2, secret=b"forged")
    with pytest.raises(OSError, match="another secret"):
        write_cells(tmp_path, first, keep=2, secret=b"secret")


def test_ranges_that_are_no_state_are_refused(tmp_path: Path) -> None:
    small, owned = sharded(full_state(), 2)
    for number, ranges in ((0, owned[0][1:]), (0, [*owned[0], owned[0][0]])):
        first = CellSnapshot.take(4, small, ranges, number=number, count=2, key=f"{len(ranges)}")
        second = CellSnapshot.take(4, small, owned[1], number=1, count=2, key=f"{len(ranges)}")
        write_cells(tmp_path, second, keep=2)
        with pytest.raises((ValueError, AssertionError), match=r"are no state: .*|names are used once"):
            write_cells(tmp_path, first, keep=2)
    assert find_save(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda body: body["files"][0].update(file="../../etc.safetensors"), "names the file"),
        (lambda body: body["files"][0]["ranges"][0].__setitem__(4, 10**6), "elements .* to 1000000 of"),
        (lambda body: body["files"][0]["ranges"][0].__setitem__(1, "float3"), "unknown dtype"),
        (lambda body: [one.__setitem__(1, "int32") for file in body["files"] for one in file["ranges"]], "expected"),
        (lambda body: body["files"][0]["ranges"][0].pop(), "is no range of a tensor"),
        (lambda body: body["files"].pop(), "is in no file|are in no file|no file holds|twice or never"),
        (lambda body: body["names"].append("ghost"), "no file holds ghost"),
        (lambda body: body["names"].pop(), "holds no state"),
        (lambda body: body.update(files=3), "expected a list"),
    ],
)
def test_a_crafted_manifest_is_a_save_error(tmp_path: Path, change: Any, told: str) -> None:
    path = write_all(tmp_path, full_state())
    body = json.loads(json.loads((path / "state.json").read_text())["body"])
    change(body)
    _saves.write_sealed(path / "state.json", body, b"")
    with pytest.raises(SaveError, match=told):
        check_save(path)


def test_all_workers_agree_on_the_newest_save_that_is_readable_to_all(tmp_path: Path) -> None:
    states = {step: full_state(step) for step in (2, 4, 6)}
    for step, state in states.items():
        first, *others = snapshots(state, 5, step)
        for one in others:
            write_cells(tmp_path, one, keep=3)
        write_cells(tmp_path, first, keep=3)
    file = tmp_path / "step-000000000006" / "tensors-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"torn")

    def resume(group: Any) -> Any:
        manifest, problems = agree_on_save(tmp_path, b"", group.rank, group.size, group.all_gather_values)
        assert manifest is not None
        return manifest.step, digest(manifest.state()), problems

    told = simulate(3).run(resume)
    assert told[0][:2] == (4, digest(states[4]))
    assert "step-000000000006: tensors-00002-of-00005.safetensors does not match its checksum" in told[0][2][0]
    assert all(one == told[0] for one in told)
    assert agree_on_save(tmp_path / "nothing", b"", 0, 1, lambda value: [value]) == (None, [])


def test_names_are_used_once_and_shared_tensors_have_one() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    tree, tensors = encode({"parts": {"model": {"a.b": one, "c": one}}, "a": {"b": two}, 3: (two + 1,)})
    assert tensor_names(tree, len(tensors)) == ["a.b", "a.b#2", "3.0"]
    metas = {"x": torch.empty(2, device="meta"), "y": torch.empty(2, device="meta")}
    assert len(encode(metas)[1]) == 2, "tensors without memory are not the same"
