"""Two jobs in one directory hear of each other; a job whose owner has gone takes over without a word."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_training import make_job, train

from phalanx.elastic import RunOptions, Saves
from phalanx.elastic.checkpoint import _owner
from phalanx.elastic.checkpoint._owner import OWNER, PATIENCE, DirectoryOwner, identity_of_job

pytestmark = pytest.mark.fast


class FakeTime:
    """A clock that only sleeping moves; ``then`` is done at the first sleep."""

    def __init__(self, then=lambda: None) -> None:
        self.now, self.then = 0.0, then

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()

    def owner(self, directory: Path, identity: str) -> DirectoryOwner:
        return DirectoryOwner(directory, identity, clock=lambda: self.now, sleep=self.sleep)


def test_another_job_is_named_once_and_its_end_lets_this_one_in(tmp_path):
    time = FakeTime()
    first, second = time.owner(tmp_path, "job a"), time.owner(tmp_path, "job b")
    assert first.claim() == "", "nobody was there"
    assert time.now == 0
    assert second.claim() == "job a"
    assert time.now >= PATIENCE, "it might have been about to go"
    waited = time.now
    assert second.claim() == "", "said once"
    assert time.now == waited, "and waited for once"
    first.release()
    assert second.claim() == ""
    assert (tmp_path / OWNER).read_text() == "job b"
    assert time.owner(tmp_path, "job a").claim() == "job b", "the other way round now"


def test_workers_of_one_job_come_and_go(tmp_path):
    time = FakeTime()
    workers = [time.owner(tmp_path, "job a") for _ in range(3)]
    assert [worker.claim() for worker in workers] == [""] * 3
    workers.pop(0).release()
    late = time.owner(tmp_path, "job a")
    assert late.claim() == "", "a replacement"
    workers.clear()
    assert time.now == 0, "nobody waited"
    assert time.owner(tmp_path, "job b").claim() == "job a", "one of them is still there"
    late.release()
    assert time.owner(tmp_path, "job b").claim() == ""


def test_one_that_is_about_to_go_is_not_told_of(tmp_path):
    first = DirectoryOwner(tmp_path, "job a")
    assert first.claim() == ""
    time = FakeTime(then=first.release)
    assert time.owner(tmp_path, "job b").claim() == ""
    assert 0 < time.now < PATIENCE


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(fd, b"job \\x1b[31mfar away")
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_job_whose_processes_were_killed_is_no_owner_any_more(tmp_path):
    command = [sys.executable, "-S", "-c", HOLDER, str(tmp_path / OWNER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        mine = FakeTime().owner(tmp_path, "job b")
        assert mine.claim() == "job [31mfar away", "without what is no text"
        holder.kill()
        holder.wait()
    assert mine.claim() == ""
    assert (tmp_path / OWNER).read_text() == "job b"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EIO])
def test_where_locks_do_not_work_nothing_is_said(tmp_path, monkeypatch, code):
    def refuse(fd, kind):
        raise OSError(code, "no locks here")

    DirectoryOwner(tmp_path, "job a").claim()
    monkeypatch.setattr(_owner.fcntl, "flock", refuse)
    assert DirectoryOwner(tmp_path, "job b").claim() == ""
    assert DirectoryOwner(tmp_path / "missing", "job b").claim() == ""
    assert not (tmp_path / "missing").exists()


def test_workers_that_others_have_started_have_no_name_in_common(tmp_path):
    assert identity_of_job({}, has_group=True) == ""
    assert identity_of_job({"WORLD_SIZE": "2", "RANK": "1"}, has_group=False) == ""
    assert identity_of_job({"PHALANX_JOB": "x", "WORLD_SIZE": "2", "RANK": "1"}, has_group=False) == "job x"
    assert identity_of_job({}, has_group=False).startswith("process ")
    assert DirectoryOwner(tmp_path, "").claim() == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["saves", "logs"])
def test_a_job_says_that_another_one_writes_to_its_directory(tmp_path, monkeypatch, capfd, what):
    monkeypatch.setattr(_owner, "PATIENCE", 0.0)
    saves, logs = tmp_path / "saves", tmp_path / "logs"
    (tmp_path / what).mkdir()
    other = DirectoryOwner(tmp_path / what, "job b")
    assert other.claim() == ""

    def run(max_steps):
        run = RunOptions(progress=False, log_dir=logs)
        job = make_job(saves=Saves(directory=saves, every=1), run=run)
        train(job, max_steps=max_steps, wait_for_saves=True)
        job.close()

    run(2)
    text = capfd.readouterr().err
    assert f"the {what} in {tmp_path / what} are those of job b, which is still running" in text
    assert text.count("still running") == 1, "once, not at every save"
    (path,) = logs.glob("events-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(line["directory"], line["owner"]) for line in lines if line["event"] == "directory_shared"]
    assert found == [(str(tmp_path / what), "job b")]
    assert (saves / "step-000000000002").is_dir(), "and goes on"
    other.release()
    run(3)
    run(4)
    assert "still running" not in capfd.readouterr().err
    assert (saves / "step-000000000004").is_dir()
