"""Saves on disk: whole or absent, checked when read, written in the background."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading

import pytest
import torch
from elastic_training import make_job, train

from phalanx.comm import simulate
from phalanx.elastic import NoReadableSave, RunOptions, SaveError, Saves
from phalanx.elastic.checkpoint import _save_folder, _save_writer, _saves
from phalanx.elastic.checkpoint._save_folder import _put_in_place, find_save, write_save
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.elastic.checkpoint._saves import check_save
from phalanx.errors import JobStopped

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
    with save.open() as files:
        found = [files.read(name) for name in save.names]
    assert all(torch.equal(a, b) for a, b in zip(found, TENSORS, strict=True))


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
        check_save(file.parent)
    save, problems = find_save(tmp_path)
    assert save.step == 1
    assert len(problems) == 1


def test_a_leftover_with_our_own_number_is_not_in_the_way(tmp_path):
    (tmp_path / f".partial-4-{socket.gethostname()}-{os.getpid()}").mkdir()
    assert write(tmp_path, 4).is_dir()
    assert write(tmp_path, 5).is_dir()


def test_a_save_of_another_format_is_refused(tmp_path):
    path = write(tmp_path, 1)
    import hashlib

    body = json.dumps({**json.loads(json.loads((path / "state.json").read_text())["body"]), "format": 99})
    checksum = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (path / "state.json").write_text(json.dumps({"checksum": checksum, "body": body}))
    with pytest.raises(SaveError, match="format 99; this release reads 1 and 2"):
        check_save(path)


def test_leftovers_of_a_killed_writer_are_removed_but_not_those_of_a_living_one(tmp_path):
    host = socket.gethostname()
    living = f".partial-3-{host}-{_save_folder._process()}.7"
    before = f".partial-4-{host}-{os.getpid()}.123.0"  # of a process that had our number, as in containers
    for name in (f".partial-2-{host}-999999999", living, before, ".partial-3-elsewhere-999999999"):
        (tmp_path / name).mkdir()
    write(tmp_path, 4)
    assert {p.name for p in tmp_path.iterdir()} == {
        living,
        ".partial-3-elsewhere-999999999",
        "step-000000000004",
    }


def test_damaged_saves_never_push_good_ones_out(tmp_path):
    good = write(tmp_path, 1)
    for step in (5, 6, 7):
        shutil.copytree(good, tmp_path / f"step-{step:012d}")
        (tmp_path / f"step-{step:012d}" / "tensors.safetensors").write_bytes(b"torn")
    for step in (2, 3):
        assert write(tmp_path, step).is_dir(), "what is returned is there"
        assert find_save(tmp_path)[0].step == step
    found = sorted(int(path.name[5:]) for path in tmp_path.iterdir())
    assert found == [2, 3, 5, 6, 7], "two readable ones; what is newer is left to be looked at"
    for step in (8, 9):
        write(tmp_path, step)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [8, 9], "what is damaged and older goes"


def test_a_save_older_than_readable_ones_is_written_and_stays_beside_the_newest(tmp_path):
    for step in (10, 11):
        write(tmp_path, step)
    assert write(tmp_path, 3).is_dir()
    assert find_save(tmp_path)[0].step == 11


def test_rotation_reads_a_save_once_and_not_those_it_wrote(tmp_path, monkeypatch):
    write_save(tmp_path, 1, {}, TENSORS, keep=3)
    read, real = [], _saves.hash_file
    monkeypatch.setattr(_saves, "hash_file", lambda path: read.append(path.parent.name) or real(path))
    known = {}
    for step in (2, 3, 4):
        write_save(tmp_path, step, {}, TENSORS, keep=5, known=known)
    assert [name for name in read if name.startswith("step-")] == ["step-000000000001"]
    (tmp_path / "step-000000000003" / "state.json").write_text("altered")
    write_save(tmp_path, 5, {}, TENSORS, keep=3, known=known)
    left = sorted(int(path.name[5:]) for path in tmp_path.iterdir())
    assert left == [2, 3, 4, 5], "one that was altered since is looked at again and not counted"


@pytest.mark.parametrize("name", ["step-x", "step-000000000009.old", "step-0000000000090000000000"])
def test_other_names_in_the_folder_are_left_alone(tmp_path, name):
    (tmp_path / name).mkdir()
    write(tmp_path, 1)
    write(tmp_path, 2)
    write(tmp_path, 3)
    assert find_save(tmp_path)[1] == []
    assert find_save(tmp_path)[0].step == 3
    assert (tmp_path / name).is_dir()


def test_a_save_under_the_name_of_another_is_refused(tmp_path):
    write(tmp_path, 1).rename(tmp_path / "step-000000000009")
    with pytest.raises(SaveError, match="holds step 1; it was renamed"):
        check_save(tmp_path / "step-000000000009")


def test_saves_are_signed_when_there_is_a_secret(tmp_path, monkeypatch):
    unsigned = write(tmp_path, 1)
    with pytest.raises(SaveError, match=r'is not signed, but there is a secret; .* pass Saves\(secret=b""\)'):
        check_save(unsigned, b"secret")
    signed = write_save(tmp_path, 2, {"step": 2}, TENSORS, keep=3, secret=b"secret")
    assert check_save(signed, b"secret").step == check_save(signed).step == 2, "damage is found without it too"
    with pytest.raises(SaveError, match="tampered with, or saved with another secret"):
        check_save(signed, b"another")
    state = json.loads((signed / "state.json").read_text())
    state["body"] = state["body"].replace('"step": 2}', '"step": 3}')
    state["checksum"] = _saves._hash(state["body"].encode())
    (signed / "state.json").write_text(json.dumps(state))
    with pytest.raises(SaveError, match="tampered with"):
        check_save(signed, b"secret")
    assert check_save(signed).tree == {"step": 3}, "who has no secret cannot know"


def test_a_job_signs_its_saves_and_falls_back_to_one_that_is_signed(tmp_path, monkeypatch):
    def job(secret=None):
        return make_job(saves=Saves(directory=tmp_path, every=2, secret=secret), run=RunOptions(progress=False))

    monkeypatch.setenv("PHALANX_CHECKPOINT_SECRET", "from the environment")
    train(job(), max_steps=4, wait_for_saves=True)
    train(job(b"from the environment"), max_steps=6, wait_for_saves=True)
    path = tmp_path / "step-000000000006" / "state.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "mac"}))
    with pytest.warns(RuntimeWarning, match="is not signed.*the save before it is used"):
        assert len(train(job(), max_steps=6)) == 2
    assert "from the environment" not in repr(Saves(directory="x", secret=b"from the environment"))


def test_the_same_step_written_twice_is_kept_unless_it_is_torn(tmp_path):
    path = write(tmp_path, 4)
    before = (path / "state.json").stat().st_mtime_ns
    write(tmp_path, 4)
    assert (path / "state.json").stat().st_mtime_ns == before
    (path / "state.json").write_text("torn")
    write(tmp_path, 4)
    assert check_save(path).step == 4


def test_two_workers_may_save_the_same_step_at_once(tmp_path):
    """What one puts in place just before the other is the same, and stays; nothing is left of the other's."""
    for name in ("one", "other"):
        write_save(tmp_path / name, 4, {"step": 4}, TENSORS, keep=1)
        (tmp_path / name / "step-000000000004").rename(tmp_path / f".partial-{name}")
    for name in ("one", "other"):
        _put_in_place(tmp_path / f".partial-{name}", tmp_path / "step-000000000004", b"")
    assert check_save(tmp_path / "step-000000000004").step == 4
    assert not list(tmp_path.glob(".partial-*"))


def test_no_save_is_not_an_error(tmp_path):
    assert find_save(tmp_path / "nothing") == (None, [])


def test_the_writer_does_not_make_the_step_wait_and_skips_to_the_newest(tmp_path, monkeypatch):
    gate, begun, written = threading.Event(), threading.Event(), []

    def slow(directory, step, tree, tensors, **keywords):
        begun.set()
        assert gate.wait(60)
        written.append(step)
        return directory

    monkeypatch.setattr(_save_writer, "write_save", slow)
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


def damage(directory):
    for path in directory.glob("step-*/tensors.safetensors"):
        path.write_bytes(b"torn")


def test_a_job_whose_saves_are_all_damaged_stops_and_says_what_to_do(tmp_path):
    def job(group=None):
        return make_job(saves=Saves(directory=tmp_path, every=2), run=RunOptions(progress=False, group=group))

    train(job(), max_steps=4, wait_for_saves=True)
    damage(tmp_path)
    with pytest.raises(NoReadableSave, match=r"(?s)none of them can be read.*step-000000000004.*Restore one"):
        train(job(), max_steps=5)
    with pytest.raises(NoReadableSave):
        job().load_save()
    assert issubclass(NoReadableSave, JobStopped), "no restart could cure it"

    def run(group):
        with pytest.raises(NoReadableSave, match=r"rank0: .*does not match its checksum") as error:
            train(job(group), max_steps=5)
        return str(error.value)

    told = simulate(2).run(run)
    assert told[0] == told[1], "all workers stop alike"
    shutil.rmtree(tmp_path)
    tmp_path.write_text("no folder")
    with pytest.raises(NoReadableSave, match=r"cannot be read: .*Not a directory"):
        train(job(), max_steps=5)


def test_a_worker_with_a_readable_save_helps_those_whose_own_are_damaged(tmp_path):
    """Each node may have a disk of its own."""
    train(make_job(saves=Saves(directory=tmp_path / "1", every=2), run=RunOptions(progress=False)), max_steps=2)
    shutil.copytree(tmp_path / "1", tmp_path / "0")
    damage(tmp_path / "0")

    def run(group):
        saves = Saves(directory=tmp_path / str(group.rank), every=9)
        return len(train(make_job(saves=saves, run=RunOptions(progress=False, group=group)), max_steps=3))

    assert simulate(2).run(run) == [1, 1]


def test_saving_needs_a_directory():
    with pytest.raises(RuntimeError, match="nowhere to save"):
        make_job(run=RunOptions(progress=False)).save()
    with pytest.raises(ValueError, match="every is 0"):
        Saves(directory="x", every=0)
