"""A disk that takes nothing more: training goes on, says so, tries again, and leaves nothing half written."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from elastic_training import make_job, train

from log_lines import read_lines
from phalanx.comm import simulate
from phalanx.elastic import NotSaved, RunOptions, Saves
from phalanx.elastic.audit import check_directory
from phalanx.elastic.checkpoint import _save_folder, _save_writer
from phalanx.elastic.checkpoint._save_folder import find_save, write_save
from phalanx.elastic.checkpoint._save_writer import SaveWriter
from phalanx.elastic.checkpoint._tensor_files import TensorRange, write_tensor_file
from phalanx.elastic.tools._audit_log import Audit
from phalanx.errors import JobStopped
from phalanx.events import _troubles
from phalanx.events._event_types import TrainingStarted
from phalanx.events._troubles import Backoff, Troubles
from phalanx.events._writer import EventLog, JsonLines, parse_lines

SCRIPT = Path(__file__).parent / "full_disk_script.py"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_script(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), *arguments], capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The same training on a sound disk, on one that is full for four steps, on one that stays full."""
    runs = {
        "sound": ("99", "99"),
        "for a while": ("4", "8"),
        "to the end": ("4", "99"),
        "left": ("4", "99", "--leave"),
    }
    found = {}
    for name, arguments in runs.items():
        directory = tmp_path_factory.mktemp("disk")
        found[name] = (directory, run_script(directory, *arguments))
    return found


def test_training_goes_on_and_the_exit_code_stays(disks):
    digests = set()
    for name in ("sound", "for a while", "to the end"):
        done = disks[name][1]
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
    assert disks["sound"][1].stderr == ""


def test_a_disk_that_recovers_has_everything_in_the_end(disks):
    directory, done = disks["for a while"]
    assert "the save of step 6 cannot be written" in done.stderr or "the save of step 8" in done.stderr
    assert "File too large; the last is of step 4, next attempt in 1 s; training goes on" in done.stderr
    assert "saves can be written again" in done.stderr
    assert "AT THE END" not in done.stderr
    verdict = check_directory(directory / "logs")
    assert (verdict.problems, verdict.num_steps) == ([], 10)
    assert find_save(directory / "saves")[0].step == 10
    events = read_lines(next((directory / "logs").glob("events-*")))
    assert {"save_failed", "saved", "finished"} <= {event["event"] for event in events}


def test_a_disk_that_stays_full_is_the_last_thing_that_is_said(disks):
    directory, done = disks["to the end"]
    last = [line for line in done.stderr.splitlines() if "AT THE END" in line]
    assert done.stderr.splitlines()[-len(last) :] == last
    assert any("the audit in" in line and "INCOMPLETE" in line for line in last)
    assert any("the save of step 10 cannot be written" in line for line in last)
    assert [path.name for path in (directory / "saves").iterdir() if path.name.startswith(".")] == []
    assert find_save(directory / "saves")[0].step == 4
    verdict = check_directory(directory / "logs")
    assert not verdict.is_complete
    assert "as far as it goes: 4 steps" in str(verdict)
    assert "NO END" in str(verdict)


def test_a_polite_leave_that_could_not_save_is_no_success(disks):
    directory, done = disks["left"]
    assert done.returncode == 1
    assert "NotSaved: all workers were told to leave, and the state at step 6 could not be saved" in done.stderr
    assert find_save(directory / "saves")[0].step == 4


@pytest.mark.fast
def test_all_workers_hear_that_the_save_at_their_leave_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(_save_writer, "write_save", lambda *a, **k: (_ for _ in ()).throw(FULL))

    def run(group):
        job = make_job(saves=Saves(directory=tmp_path), run=RunOptions(progress=False, group=group))
        job.regrouping.leave.requested = group.rank == 1  # what SIGTERM does in the main thread
        with pytest.raises(NotSaved, match=r"at step 1 could not be saved .*No space left"):
            train(job, max_steps=3)
        return True

    assert simulate(2).run(run) == [True, True]
    assert issubclass(NotSaved, JobStopped), "a replacement would begin from an older save and train on"


@pytest.mark.fast
@pytest.mark.parametrize("place", ["write_files", "_put_in_place", "sync"])
def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, place):
    def fail(*args, **keywords):
        raise FULL

    write_save(tmp_path, 1, {}, [torch.ones(3)], keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(_save_folder, place, fail)
        with pytest.raises(OSError, match="No space left"):
            write_save(tmp_path, 2, {}, [torch.ones(3)], keep=2)
    assert not list(tmp_path.glob(".partial*"))
    assert find_save(tmp_path)[0].step == (2 if place == "sync" else 1)


@pytest.mark.fast
def test_what_safetensors_says_of_a_full_disk_is_an_error_of_the_disk(tmp_path, monkeypatch):
    def fail(tensors, path):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*file") as error:
        write_tensor_file(tmp_path / "file", [TensorRange.of("w", torch.ones(3))])
    assert error.value.errno == errno.ENOSPC


@pytest.mark.fast
def test_an_explicit_save_raises_and_one_in_the_background_does_not(tmp_path, monkeypatch, capfd):
    def fail(*args, **keywords):
        raise FULL

    monkeypatch.setattr(_save_writer, "write_save", fail)
    job = make_job(saves=Saves(directory=tmp_path, every=1), run=RunOptions(progress=False))
    assert len(train(job, max_steps=3)) == 3
    with pytest.raises(OSError, match="No space left"):
        job.save()
    monkeypatch.undo()
    job.save()
    assert find_save(tmp_path)[0].step == 3
    job.close()
    assert "saves can be written again" in capfd.readouterr().err


@pytest.mark.fast
def test_the_writer_tries_again_by_itself_with_the_newest_snapshot(tmp_path, monkeypatch):
    attempts, saved, now = [], threading.Event(), [0.0]

    def write(directory, step, *args, **keywords):
        attempts.append((step, now[0]))
        if len(attempts) < 4:
            raise FULL
        saved.set()
        return directory

    monkeypatch.setattr(_save_writer, "write_save", write)
    writer = SaveWriter(tmp_path, keep=1, on_saved=lambda step, path: None, on_failed=lambda *told: tick(*told))
    writer._saves.backoff = Backoff(clock=lambda: now[0])

    def tick(step, error, delay):
        if step == 1:
            writer.submit((2, {}, []))
        now[0] += delay  # the pause passes at once

    writer.submit((1, {}, []))
    assert saved.wait(60)
    writer.close()
    assert attempts == [(1, 0.0), (2, 1.0), (2, 3.0), (2, 7.0)]


@pytest.mark.fast
def test_an_error_that_is_not_the_disks_is_raised(tmp_path, monkeypatch):
    def fail(*args, **keywords):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(_save_writer, "write_save", fail)
    writer = SaveWriter(tmp_path, keep=1, on_saved=lambda step, path: None)
    writer.submit((1, {}, []))
    with pytest.raises(ValueError, match="a fault of ours"):
        writer.wait_idle()
    writer.close()


@pytest.mark.fast
@pytest.mark.parametrize("before", [0, 1], ids=["a new file", "an open file"])
def test_lines_wait_until_the_disk_takes_them_and_none_is_torn(tmp_path, monkeypatch, before):
    left, real = [7], os.write

    def write(fd, data):
        """Seven more bytes fit on the disk, then none."""
        if left[0] == 0:
            raise FULL
        count = real(fd, bytes(data)[: left[0]])
        left[0] -= count
        return count

    lines = JsonLines(tmp_path / "a.jsonl")
    lines._backoff = Backoff(clock=lambda: 0.0)
    for number in range(before):
        lines.append({"number": number})
    monkeypatch.setattr("phalanx.events._writer.os.write", write)
    for number in range(before, 3):
        lines.append({"number": number})
    monkeypatch.undo()
    assert (tmp_path / "a.jsonl").read_bytes() == before * b'{"number":0}\n' + b'{"numbe'
    lines.close()
    assert parse_lines((tmp_path / "a.jsonl").read_bytes()) == ([{"number": n} for n in range(3)], 0)


@pytest.mark.fast
def test_lines_that_no_memory_holds_are_counted_and_the_file_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("phalanx.events._writer.MAX_PENDING", 100)
    path = tmp_path / "a.jsonl"
    path.symlink_to("/dev/full")
    troubles = Troubles()
    audit = Audit(path, troubles=troubles)
    for step in range(5):
        audit.committed([0, 0, 0], 0, step)
    assert audit.num_lost == 4
    assert troubles.status == "audit CANNOT BE WRITTEN"
    path.unlink()
    os.close(audit._fd)
    audit._fd = -1
    audit.close()
    assert [record["kind"] for record in read_lines(path)] == ["commit", "lost"]
    assert read_lines(path)[1]["lines"] == 4
    err = capfd.readouterr().err
    assert "the audit cannot be written" in err
    assert "audit can be written again" in err


@pytest.mark.fast
def test_a_line_that_a_killed_process_began_does_not_swallow_the_next(tmp_path):
    (tmp_path / "events").write_bytes(b'{"time": 1.0, "event": "sta')
    events = EventLog(tmp_path / "events", worker="w")
    events.write(TrainingStarted(pid=1))
    events.close()
    assert [record["event"] for record in read_lines(tmp_path / "events")] == ["started"]


@pytest.mark.fast
def test_a_log_directory_that_cannot_be_made_does_not_end_a_job(tmp_path, capfd):
    (tmp_path / "logs").write_text("a file in its place")
    job = make_job(run=RunOptions(progress=True, log_dir=tmp_path / "logs"))
    assert len(train(job, max_steps=2)) == 2
    job.close()
    err = capfd.readouterr().err
    assert "CANNOT BE WRITTEN" in err, "the status line"
    assert err.count("AT THE END") == 2
    assert "audit" in err
    assert "events" in err


@pytest.mark.fast
def test_nothing_is_said_when_stderr_is_full_too(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise FULL

    monkeypatch.setattr(sys, "stderr", Full())
    _troubles.say("nobody hears this")


@pytest.mark.fast
def test_the_same_trouble_is_said_once_a_minute(capfd):
    now = [0.0]
    troubles = Troubles(clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        troubles.failed("saves", f"at {now[0]:g}")
    assert capfd.readouterr().err.splitlines() == [
        "phalanx: at 0; training goes on",
        "phalanx: at 60; training goes on",
    ]
    troubles.worked("saves")
    assert capfd.readouterr().err == "phalanx: saves can be written again, after 5 failed attempts in 61 s\n"
    troubles.say_last_words()
    assert capfd.readouterr().err == ""
