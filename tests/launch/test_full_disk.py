"""A log directory that takes nothing more: workers go on, and the log says where their output went."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx.events._agent_events import AgentEventsLost
from phalanx.events._lines import dump
from phalanx.launch import DefaultLogsSpecs, Std
from phalanx.launch.events import EventLog, ShutDown, read_events
from phalanx.launch.failures._error_file import EXIT_INCURABLE, write_error_file
from phalanx.launch.failures._process_failure import ProcessFailure
from phalanx.launch.failures._recording import record_exception
from phalanx.launch.telemetry._logs import open_log
from phalanx.launch.telemetry._pump import Sinks, deliver, finish
from phalanx.launch.workers._after_fork import Output

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

SCRIPT = """
import os, resource, sys
from pathlib import Path

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

logs, generation = Path(sys.argv[1]), os.environ["PHALANX_GENERATION"]
no_limit = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, no_limit))
resource.prlimit(parent(os.getppid()), resource.RLIMIT_FSIZE, (2048, no_limit))   # the agent
for number in range(2000):
    print("out", number, generation)
    print("err", number, generation, file=sys.stderr)
if generation == "0":
    (run,) = logs.iterdir()
    run.rename(logs.parent / "gone")  # at once: the agent appends to files in there
    run.write_text("")
    sys.exit(7)
resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
print("the end")
"""


def test_a_log_directory_that_fills_up_and_goes_away_ends_nothing(tmp_path):
    """Files that cannot grow, for the worker and for the agent, then no directory for the next generation."""
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    words = ["--max-restarts", "1", "--log-dir", logs, "--redirects", "1", "--tee", "2"]
    words += ["--duplicate-stderr-filters", "err", script, logs]
    agent = subprocess.run(  # its console is a pipe, which may grow
        [sys.executable, "-m", "phalanx", "run", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    output = agent.stdout
    found = re.search(r"logs cannot be kept in .*; they go to (\S+)", output)
    assert agent.returncode == 0, output
    assert "cannot be written to its log file: " in output
    assert "err 1999 1" in output, "the console had all of it"
    (out,) = Path(found[1]).glob("attempt_1/0/stdout.log")
    assert re.search(r"phalanx: \d+ bytes of output were lost: the disk was full\nthe end\n$", out.read_text())


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A path under which nothing can be made, not even by root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "logs"


@pytest.mark.fast
def test_logs_that_cannot_be_kept_go_elsewhere(nowhere, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    specs = DefaultLogsSpecs(log_dir=str(nowhere), redirects=Std.ALL)
    envs = {0: {"PHALANX_GENERATION": "3"}, 1: {}}
    dest = specs.reify(envs)
    assert Path(dest.stdouts[1]).parent.is_dir()
    assert dest.stdouts[1].startswith(str(tmp_path / "phalanx_logs_"))
    assert envs[0]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[0]
    assert "logs cannot be kept in" in caplog.text


@pytest.mark.fast
def test_workers_start_where_nothing_can_be_kept_at_all(nowhere, monkeypatch, caplog):
    def fail(*args, **keywords):
        raise FULL

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    envs = {0: {"PHALANX_GENERATION": "3"}}
    dest = DefaultLogsSpecs(log_dir=str(nowhere)).reify(envs)
    assert (dest.stdouts[0], envs[0]["TORCHELASTIC_ERROR_FILE"]) == ("", "")
    assert "nor anywhere else" in caplog.text
    assert open_log(str(nowhere / "stdout.log")) == -1


@pytest.mark.fast
def test_a_full_disk_does_not_end_the_thread_that_moves_output(nowhere, caplog):
    read_end, write_end = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    sinks = Sinks(
        console_fd=write_end,
        file_fd=full,
        prefix=b"p:",
        filters=(b"x",),
        filtered_path=str(nowhere / "filtered"),
    )
    for _ in range(3):
        deliver(sinks, b"x\n")
    finish(sinks)
    os.close(write_end)
    assert os.read(read_end, 100) == b"p:x\n" * 3
    os.close(read_end)
    assert caplog.text.count("cannot be written to its log file") == 1, "once, not for each line"


@pytest.mark.fast
def test_printing_to_a_full_disk_does_not_end_a_worker(tmp_path, monkeypatch):
    with Output(os.open("/dev/full", os.O_WRONLY), "w") as out:
        assert out.write(b"lost") == 4
        os.dup2(os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY, 0o600), out.fileno())
        out.write(b"there")
    assert (tmp_path / "out").read_bytes() == b"\nphalanx: 4 bytes of output were lost: the disk was full\nthere"
    read_end, write_end = os.pipe()
    os.close(read_end)
    with Output(write_end, "w") as out, pytest.raises(BrokenPipeError):
        out.write(b"a reader that has gone is not a full disk")


@pytest.mark.fast
def test_events_go_on_when_the_disk_takes_them_again(tmp_path, monkeypatch, caplog):
    event, real = ShutDown(job="j", reason="r", succeeded=True), os.write
    log = EventLog(tmp_path / "events.jsonl")

    def torn(fd, data):
        return real(fd, data[:10])

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("phalanx.events._writer.os.write", torn)
        log.write(event)
    log.write(event)
    log.close()
    found = [found.kind for found in read_events(tmp_path / "events.jsonl")]
    assert found == ["shut_down", "shut_down"], "the one that was torn is written again"
    assert "the job goes on" in caplog.text
    assert "events can be written again" in caplog.text


@pytest.mark.fast
def test_lines_that_an_agent_gave_up_are_told_by_an_event_of_their_own_type(tmp_path):
    record = EventLog(tmp_path / "events.jsonl", job="j").lost_record(3)
    (tmp_path / "events.jsonl").write_text(dump(record) + "\n")
    (found,) = read_events(tmp_path / "events.jsonl")
    assert (type(found), found.job, found.lines) == (AgentEventsLost, "j", 3)


@pytest.mark.fast
def test_a_handler_that_raises_is_not_the_jobs_problem(caplog):
    def handler(line):
        raise RuntimeError("a user's fault")

    EventLog(None, handler).write(ShutDown(job="j", reason="r", succeeded=True))
    assert "a user's fault" in caplog.text


@pytest.mark.fast
def test_an_error_file_that_cannot_be_written_leaves_nothing(tmp_path, capfd):
    (tmp_path / f"error.json.{os.getpid()}").symlink_to("/dev/full")
    assert not write_error_file(str(tmp_path / "error.json"), "m", "", is_incurable=False)
    assert "cannot write error file" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_what_no_restart_can_cure_is_told_without_a_disk_too(nowhere, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(nowhere / "error.json"))
    assert record_exception(ValueError("again?")) == 1
    assert record_exception(ImportError("again")) == EXIT_INCURABLE
    for code, is_incurable in ((1, False), (EXIT_INCURABLE, True)):
        failure = ProcessFailure(
            exitcode=code, error_file=str(nowhere / "error.json"), timestamp=1.0, local_rank=0, pid=1
        )
        assert failure.is_incurable is is_incurable
