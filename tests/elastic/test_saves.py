"""Saves on disk: whole or absent, checked when read, written in the background."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
import torch
from elastic_training import make_job, train

from phalanx.elastic import RunOptions, SaveError, Saves, _writer
from phalanx.elastic._saves import _put_in_place, find_save, read_save, write_save
from phalanx.elastic._writer import SaveWriter

pytestmark = pytest.mark.fast

TENSORS = [torch.arange(5.0), torch.ones(2, 2, dtype=torch.int64)]


def write(directory, step):
    return write_save(directory, step, {"step": step}, TENSORS, keep=2)


def test_a_save_is_read_back_and_old_ones_are_removed(tmp_path):
    for step in (1, 2, 10):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000002", "step-000000000010"]
    save, problems = find_save(tmp_path)
    assert problems == []
    assert save.step == 10
    assert save.tree == {"step": 10}
    assert all(torch.equal(a, b) for a, b in zip(save.tensors, TENSORS, strict=True))


def test_a_save_is_on_the_disk_before_it_gets_its_name_and_its_name_after(tmp_path, monkeypatch):
    done, real_sync, real_rename = [], os.fsync, os.rename

    def sync(fd):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_sync(fd)

    def rename(source, target):
        done.append(f"to {target.name}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    final = write(tmp_path, 1)
    *files, partial, named, parent = done
    assert sorted(files) == ["state.json", "tensors.safetensors"]
    assert partial != final.name, "the folder's own names, under its first name"
    assert (named, parent) == (f"to {final.name}", tmp_path.name)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_torn_or_altered_save_is_detected_and_the_one_before_is_used(tmp_path, name, damage):
    write(tmp_path, 1)
    file = write(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    with pytest.raises(SaveError, match="step-000000000002"):
        read_save(file.parent)
    save, problems = find_save(tmp_path)
    assert save.step == 1
    assert len(problems) == 1


def test_a_save_of_another_format_is_refused(tmp_path):
    path = write(tmp_path, 1)
    import hashlib

    body = json.dumps({**json.loads(json.loads((path / "state.json").read_text())["body"]), "format": 99})
    checksum = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (path / "state.json").write_text(json.dumps({"checksum": checksum, "body": body}))
    with pytest.raises(SaveError, match="format 99; this release reads 1"):
        read_save(path)


def test_leftovers_of_a_killed_writer_are_removed_but_not_those_of_a_living_one(tmp_path):
    host = socket.gethostname()
    living = f".partial-3-{host}-{os.getpid()}"
    for name in (f".partial-2-{host}-999999999", living, ".partial-3-elsewhere-999999999"):
        (tmp_path / name).mkdir()
    write(tmp_path, 4)
    assert {p.name for p in tmp_path.iterdir()} == {
        living,
        ".partial-3-elsewhere-999999999",
        "step-000000000004",
    }


def test_the_same_step_written_twice_is_kept_unless_it_is_torn(tmp_path):
    path = write(tmp_path, 4)
    before = (path / "state.json").stat().st_mtime_ns
    write(tmp_path, 4)
    assert (path / "state.json").stat().st_mtime_ns == before
    (path / "state.json").write_text("torn")
    write(tmp_path, 4)
    assert read_save(path).step == 4


def test_two_workers_may_save_the_same_step_at_once(tmp_path):
    """What one puts in place just before the other is the same, and stays; nothing is left of the other's."""
    for name in ("one", "other"):
        write_save(tmp_path / name, 4, {"step": 4}, TENSORS, keep=1)
        (tmp_path / name / "step-000000000004").rename(tmp_path / f".partial-{name}")
    for name in ("one", "other"):
        _put_in_place(tmp_path / f".partial-{name}", tmp_path / "step-000000000004")
    assert read_save(tmp_path / "step-000000000004").step == 4
    assert not list(tmp_path.glob(".partial-*"))


def test_no_save_is_not_an_error(tmp_path):
    assert find_save(tmp_path / "nothing") == (None, [])


def test_the_writer_does_not_make_the_step_wait_and_skips_to_the_newest(tmp_path, monkeypatch):
    gate, begun, written = threading.Event(), threading.Event(), []

    def slow(directory, step, tree, tensors, *, keep):
        begun.set()
        assert gate.wait(60)
        written.append(step)
        return directory

    monkeypatch.setattr(_writer, "write_save", slow)
    writer = SaveWriter(tmp_path, keep=1, on_saved=lambda step, path: None)
    writer.submit((1, {}, []))
    assert begun.wait(60)
    writer.submit((2, {}, []))
    writer.submit((3, {}, []))
    assert written == []
    gate.set()
    writer.wait_idle()
    assert written == [1, 3]
    writer.close()


def test_an_error_of_the_disk_reaches_the_job(tmp_path, monkeypatch):
    def full(*args, **keywords):
        raise OSError("no space left")

    monkeypatch.setattr(_writer, "write_save", full)
    writer = SaveWriter(tmp_path, keep=1, on_saved=lambda step, path: None)
    writer.submit((1, {}, []))
    with pytest.raises(OSError, match="no space left"):
        writer.wait_idle()
    writer.close()


def test_a_job_warns_of_a_bad_save_and_resumes_from_the_one_before(tmp_path):
    def job():
        return make_job(saves=Saves(directory=tmp_path, every=2), run=RunOptions(progress=False))

    train(job(), max_steps=6, wait_for_saves=True)
    (tmp_path / "step-000000000006" / "tensors.safetensors").write_bytes(b"torn")
    resumed = job()
    with pytest.warns(RuntimeWarning, match="does not match its checksum; the save before it is used"):
        losses = train(resumed, max_steps=7)
    assert len(losses) == 3, "steps 4, 5 and 6"
    undisturbed = make_job(run=RunOptions(progress=False))
    train(undisturbed, max_steps=7)
    assert resumed.digest() == undisturbed.digest()


def test_saving_needs_a_directory():
    with pytest.raises(RuntimeError, match="nowhere to save"):
        make_job(run=RunOptions(progress=False)).save()
    with pytest.raises(ValueError, match="every is 0"):
        Saves(directory="x", every=0)
