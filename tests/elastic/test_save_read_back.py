"""A save counts once it was read back from the disk: what differs from memory is told, and written again."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from elastic_training import make_job, train
from hypothesis import given
from hypothesis import strategies as st
from test_cell_saves import full_state, snapshots, state_of, write_all

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import RunOptions, Saves
from phalanx.elastic.checkpoint import _read_back, _saves
from phalanx.elastic.checkpoint._cell_saves import write_cells
from phalanx.elastic.checkpoint._read_back import PIECE, check_written
from phalanx.elastic.checkpoint._save_folder import find_save, write_save
from phalanx.elastic.checkpoint._state import digest

pytestmark = pytest.mark.fast

TENSORS = [
    torch.arange(5.0),
    torch.full((2,), float("nan")),
    torch.tensor(True),
    torch.ones(3, dtype=torch.complex64),
]


class BadDisk:
    """Between a file's writing and its reading a bit changes, as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.place = -1
        """Which byte."""
        self.only = ""
        """Of files whose names hold this."""
        self._save: Callable[..., None] = safetensors.torch.save_file
        monkeypatch.setattr(safetensors.torch, "save_file", self.write)

    def write(self, tensors: Any, path: Path) -> None:
        self._save(tensors, path)
        if self.times and self.only in path.name:
            self.times -= 1
            data = bytearray(path.read_bytes())
            data[self.place] ^= 1
            path.write_bytes(data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    return BadDisk(monkeypatch)


def write(directory: Path, step: int, *, verify: bool = True) -> Path:
    return write_save(directory, step, {"step": step}, TENSORS, keep=1, verify=verify)


def test_a_save_whose_bytes_change_on_the_disk_is_none_and_the_one_before_stays(tmp_path: Path, disk: BadDisk) -> None:
    write(tmp_path, 1)
    for disk.place in (-1, 20):  # a value, and the names of the tensors
        disk.times = 1
        with pytest.raises(OSError, match="read back and is not what was written") as caught:
            write(tmp_path, 2)
        assert caught.value.errno == errno.EIO
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"], "the only good one"
    write(tmp_path, 2)
    save, problems = find_save(tmp_path)
    assert (save.step if save else None, problems) == (2, [])


def test_without_it_nobody_notices(tmp_path: Path, disk: BadDisk) -> None:
    """Its checksum is that of the file: the reason to compare with memory."""
    disk.times = 1
    write(tmp_path, 2, verify=False)
    save, problems = find_save(tmp_path)
    assert (save.step if save else None, problems) == (2, [])


def test_a_manifest_that_changes_on_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(path: Path) -> None:
        if path.name == "state.json":
            path.write_text(path.read_text().replace("step", "stop", 1))

    monkeypatch.setattr(_saves, "forget_pages", forget)
    with pytest.raises(OSError, match=r"state\.json was read back"):
        write(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@given(
    size=st.sampled_from([0, 1, 7, PIECE, PIECE + 1, 2 * PIECE + 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]),
    data=st.data(),
)
def test_any_bit_of_any_tensor_counts(
    tmp_path_factory: pytest.TempPathFactory, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    values = (torch.arange(size) % 2).to(dtype)
    safetensors.torch.save_file({"a": values}, path)
    check_written(path, {"a": values})
    with pytest.raises(OSError, match="read back"):
        check_written(path, {"b": values})
    if size:
        changed = values.clone()
        raw = changed.view(torch.uint8)
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
        with pytest.raises(OSError, match="read back"):
            check_written(path, {"a": changed})


def test_each_worker_reads_its_own_file_back(tmp_path: Path, disk: BadDisk) -> None:
    state = full_state()
    first, second, third = snapshots(state, 3)
    disk.times, disk.only = 1, "tensors-00002"
    with pytest.raises(OSError, match=r"tensors-00002-of-00003\.safetensors was read back"):
        write_cells(tmp_path, second, keep=2, verify=True)
    write_cells(tmp_path, third, keep=2, verify=True)
    with pytest.raises(TimeoutError, match=r"the files of workers \[1\] of 3 are not in"):
        write_cells(tmp_path, first, keep=2, verify=True, patience=0.02)
    write_cells(tmp_path, second, keep=2, verify=True)  # as its writer tries again
    path = write_cells(tmp_path, first, keep=2, verify=True)
    assert path is not None
    assert digest(state_of(path)) == digest(state)


def test_the_files_of_all_workers_are_read_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = _read_back.check_written
    monkeypatch.setattr(
        "phalanx.elastic.checkpoint._tensor_files.check_written",
        lambda path, values: (read.append(path.name), real(path, values))[1],
    )
    write_all(tmp_path, full_state(), verify=True)
    assert sorted(read) == [f"tensors-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    write_all(tmp_path, full_state(), step=5)
    assert len(read) == 3


def test_a_job_tells_of_it_writes_again_and_says_what_was_verified(tmp_path: Path, disk: BadDisk) -> None:
    disk.times = 1
    saves = Saves(directory=tmp_path / "saves", every=2)
    job = make_job(saves=saves, run=RunOptions(progress=False, log_dir=tmp_path / "logs"))
    train(job, max_steps=2, wait_for_saves=False)
    with suppress(OSError):  # of the first attempt, if it is not over yet
        job.saving.wait_idle()
    job.saving.wait_idle()
    told = [one for path in (tmp_path / "logs").glob("events-*") for one in read_lines(path)]
    kinds = [one["event"] for one in told if "save" in one["event"]]
    assert kinds == ["save_failed", "saved"]
    failed, saved = (one for one in told if "save" in one["event"])
    assert "not what was written" in failed["error"]
    assert (saved["step"], saved["verified"]) == (2, True)
    assert json.loads((tmp_path / "saves" / "step-000000000002" / "state.json").read_text())


def test_what_was_not_read_back_is_not_said_to_be(tmp_path: Path, disk: BadDisk) -> None:
    saves = Saves(directory=tmp_path / "saves", every=2, verify=False)
    train(
        make_job(saves=saves, run=RunOptions(progress=False, log_dir=tmp_path / "logs")),
        max_steps=2,
        wait_for_saves=True,
    )
    [saved] = [
        one for path in (tmp_path / "logs").glob("events-*") for one in read_lines(path) if one["event"] == "saved"
    ]
    assert "verified" not in saved


def test_workers_of_a_sharded_job_read_back_what_each_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = _read_back.check_written
    monkeypatch.setattr(
        "phalanx.elastic.checkpoint._tensor_files.check_written",
        lambda path, values: (read.append(path.name), real(path, values))[1],
    )

    def run(group: Any) -> None:
        options = RunOptions(progress=False, log_dir=tmp_path / "logs", group=group)
        saves = Saves(directory=tmp_path / "saves", every=2)
        train(make_job(copies=1, saves=saves, run=options), max_steps=3, wait_for_saves=True)

    simulate(2).run(run)
    assert sorted(read) == [f"tensors-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    told = [one for path in (tmp_path / "logs").glob("events-*") for one in read_lines(path)]
    assert [(one["step"], one["verified"]) for one in told if one["event"] == "saved"] == [(2, True)]


def test_a_tensor_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    tree, tensors = {"average": {"$": "tensor", "i": 0}}, [torch.ones(2, dtype=torch.complex128)]
    with pytest.raises(TypeError, match=r"average.* is a tensor of torch.complex128.*torch.view_as_real"):
        write_save(tmp_path, 1, tree, tensors, keep=1)
    assert list(tmp_path.iterdir()) == []
