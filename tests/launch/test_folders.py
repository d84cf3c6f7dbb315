"""Folders of agents: found while their owner lives, removed by the next one when it was killed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.__main__ import main
from phalanx.launch import DefaultLogsSpecs
from phalanx.launch.cli._scale import main as scale_main
from phalanx.launch.system._folders import (
    TEMPORARY_LOGS,
    OwnedFolder,
    RunningJob,
    open_agent_folder,
    register_job,
    running_jobs,
    sweep,
)

pytestmark = pytest.mark.timeout(300)

JOB = RunningJob(run_id="job7", store_url="tcp://localhost:1", secret_file="/etc/secret")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # short, as the names of sockets must be
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def in_process_that_is_killed(body: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.fast
def test_what_a_killed_owner_left_is_removed_and_nothing_else(temporary: Path) -> None:
    def leave() -> None:
        register_job(open_agent_folder(), JOB)
        (Path(DefaultLogsSpecs().run_log_dir("run")) / "attempt_0").mkdir()

    in_process_that_is_killed(leave)
    left = {*temporary.glob("phalanx-*/agent_*"), *temporary.glob(f"{TEMPORARY_LOGS}run_*")}
    assert len(left) == 2
    mine, kept = open_agent_folder(), OwnedFolder(TEMPORARY_LOGS)
    kept.keep()  # the logs of a job that failed, for whoever reads its report
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".owner").touch()
    (temporary / f"{TEMPORARY_LOGS}link").symlink_to(elsewhere)
    (temporary / f"{TEMPORARY_LOGS}unmarked").mkdir()
    assert {Path(path) for path in sweep()} == left
    assert sweep() == []
    assert os.path.exists(mine.path)
    assert os.path.exists(kept.path)
    assert elsewhere.exists()
    mine.remove()
    mine.remove()
    assert not os.path.exists(mine.path)


@pytest.mark.fast
def test_running_jobs_are_those_whose_agents_live(temporary: Path) -> None:
    assert running_jobs() == []
    in_process_that_is_killed(lambda: register_job(open_agent_folder(), JOB))
    assert running_jobs() == []
    folders = [open_agent_folder() for _ in range(3)]  # two agents of one job, and one that has yet to find its own
    for folder in folders[:2]:
        register_job(folder, JOB)
    assert running_jobs() == [JOB]
    for folder in folders:
        folder.remove()
    assert running_jobs() == []


@pytest.mark.fast
def test_a_register_that_others_can_write_to_is_not_used(temporary: Path) -> None:
    register = temporary / f"phalanx-{os.getuid()}"
    register.mkdir()
    register.chmod(0o777)
    folder = open_agent_folder()
    register_job(folder, JOB)
    assert Path(folder.path).parent == temporary
    assert running_jobs() == []
    folder.remove()


@pytest.mark.fast
def test_scale_says_which_jobs_it_could_mean(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*words: str) -> str:
        assert scale_main([*words, "--nproc", "3"]) == 2
        return capsys.readouterr().err

    assert "no job of yours runs on this machine" in says()
    assert "--rdzv-endpoint without --rdzv-id" in says("--rdzv-endpoint", "node0:1")
    folders = [open_agent_folder() for _ in range(2)]
    register_job(folders[0], JOB)
    register_job(folders[1], RunningJob(run_id="job8", store_url="tcp://localhost:2"))
    said = says()
    assert "2 jobs of yours run on this machine" in said
    assert "job7 at tcp://localhost:1" in said
    assert "choose one with --rdzv-id" in said
    assert "no job 'job9' of yours" in says("--rdzv-id", "job9")
    for folder in folders:
        folder.remove()


@pytest.mark.fast
@pytest.mark.parametrize("command", ["events", "logs", "report", "status"])
def test_of_several_jobs_a_command_says_which_it_could_mean(
    temporary: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command]) == 2
    assert "no job of yours runs on this machine" in capsys.readouterr().err
    folders = [open_agent_folder() for _ in range(2)]
    register_job(folders[0], JOB)
    register_job(folders[1], RunningJob(run_id="job8", store_url="tcp://localhost:2"))
    try:
        is_list = command == "status"
        assert main([command]) == (0 if is_list else 2)
        said = capsys.readouterr()
        assert "2 jobs of yours run on this machine" in (said.out if is_list else said.err)
        assert "job8" in (said.out if is_list else said.err)
        if is_list:
            assert main(["status", "--json"]) == 0
            jobs = json.loads(capsys.readouterr().out)["jobs"]
            assert sorted(job["job"] for job in jobs) == ["job7", "job8"]
    finally:
        for folder in folders:
            folder.remove()


LOADING = """
import multiprocessing.util, os, signal, sys, time
import torch
from torch.utils.data import DataLoader

loader = iter(DataLoader(torch.arange(4.0), num_workers=1, batch_size=2, multiprocessing_context="fork"))
next(loader)
print("sockets in", multiprocessing.util.get_temp_dir(), os.listdir(multiprocessing.util.get_temp_dir()), flush=True)
os.kill(loader._workers[0].pid, signal.SIGKILL)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def test_killed_loaders_and_agents_leave_nothing_beyond_the_next_start(launcher, tmp_path, temporary, wait_for):
    script, end = tmp_path / "loads.py", tmp_path / "end"
    script.write_text(LOADING)
    agent = launcher.run(script, end, TMPDIR=str(temporary))
    wait_for(lambda: "sockets in" in agent.output, "a batch", agent)
    assert "listener-" in agent.output  # of the loader
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    assert list(temporary.glob("phalanx-*/agent_*"))
    assert list(temporary.glob(f"{TEMPORARY_LOGS}*"))
    end.touch()
    after = launcher.run(script, end, TMPDIR=str(temporary))
    assert after.wait() == 0, after.output
    assert [path for path in temporary.rglob("*") if path.parent != temporary] == []
    assert [path.name for path in temporary.iterdir()] == [f"phalanx-{os.getuid()}"]
