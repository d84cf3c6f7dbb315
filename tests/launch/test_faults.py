"""Faults in real processes, one agent: what the job does, what is reported, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.launch.conftest import complete_rows as lines

from phalanx.launch._linux import process_state

pytestmark = pytest.mark.timeout(300)


@pytest.mark.again
@pytest.mark.parametrize("fault", ["0:2:kill", "1:2:kill", "1:2:raise", "1:2:segv", "1:2:exit1"])
def test_restart_after_a_fault_runs_everybody_again(launcher, tmp_path, fault):
    agent = launcher.run("--nproc-per-node", 3, "--max-restarts", 2, "summing.py", tmp_path, 4, fault)
    assert agent.wait() == 0, agent.output
    starts = lines(tmp_path / "starts")
    assert sorted((g, restart, rank) for g, restart, rank, _, _ in starts) == sorted(
        (str(g), str(g), str(rank)) for g in (0, 1) for rank in range(3)
    )
    assert sorted(lines(tmp_path / "ends")) == [["0"], ["1"], ["2"]]
    launcher.wait_until_empty()


@pytest.mark.again
def test_two_at_once_cost_one_restart(launcher, tmp_path):
    agent = launcher.run(
        "--nproc-per-node", 3, "--max-restarts", 1, "summing.py", tmp_path, 4, "0:2:kill", "2:2:kill"
    )
    assert agent.wait() == 0, agent.output
    assert sorted(lines(tmp_path / "ends")) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("1:1:kill", "exitcode  : -9 (SIGKILL)"),
        ("1:1:raise", "error     : RuntimeError: told to fail"),
        ("1:1:exit1", "exitcode  : 1"),
        ("1:1:segv", "exitcode  : -11 (SIGSEGV)"),
    ],
)
def test_final_report_names_the_root_cause(launcher, tmp_path, fault, expected):
    agent = launcher.run("--nproc-per-node", 2, "summing.py", tmp_path, 3, fault)
    assert agent.wait() == 1
    report = agent.output.partition("Root cause (the earliest failure):")[2]
    assert expected in report, agent.output
    assert re.search(r"rank +: 1 \(local_rank: 1", report), agent.output
    launcher.wait_until_empty()


SUMMING_FOR_EVER = """
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
for turn in range(10**9):
    dist.all_reduce(torch.ones(1))
    if turn == 0:
        with open(os.path.join(sys.argv[1], "ready"), "a") as file:
            file.write(f"{dist.get_rank()} {os.getpid()} {os.getppid()}\\n")
"""


def test_the_root_cause_is_named_though_its_end_is_noticed_last(launcher, tmp_path, wait_for):
    """The process that notices ends is stopped, until the victim's peer has complained and ended too."""
    script = tmp_path / "for_ever.py"
    script.write_text(SUMMING_FOR_EVER)
    agent = launcher.run("--nproc-per-node", 2, script, tmp_path)
    wait_for(lambda: len(lines(tmp_path / "ready")) == 2, "two workers", agent)
    (peer, zygote), (victim, _) = (map(int, row[1:]) for row in sorted(lines(tmp_path / "ready")))
    os.kill(zygote, signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: process_state(peer) == "Z", "the other worker to notice and end", agent)
    finally:
        os.kill(zygote, signal.SIGCONT)
    assert agent.wait() == 1
    report = agent.output.partition("Root cause (the earliest failure):")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1", report), agent.output
    assert "exitcode  : -9 (SIGKILL)" in report, agent.output
    assert re.search("(closed|reset) by peer", report.partition("Other failures")[2]), agent.output
    launcher.wait_until_empty()


def test_restarts_are_used_up_then_the_job_fails(launcher, tmp_path):
    script = tmp_path / "always.py"
    script.write_text(
        "import sys, os\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\nsys.exit(7)\n"
    )
    agent = launcher.run("--max-restarts", 2, script)
    assert agent.wait() == 1
    assert re.findall(r"start (\d)", agent.output) == ["0", "1", "2"]
    assert "all 2 restarts are used" in agent.output


def test_a_failing_import_is_not_retried(launcher, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("print('started', flush=True)\nimport no_such_module_anywhere\n")
    agent = launcher.run("--max-restarts", 5, script)
    assert agent.wait() == 1
    assert agent.output.count("started") == 1
    assert "a restart cannot cure that" in agent.output
    assert "ModuleNotFoundError" in agent.output.partition("Root cause")[2]


@pytest.mark.again
def test_early_exit_with_0_is_success_when_the_others_succeed(launcher, tmp_path):
    script = tmp_path / "early.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(0.3)\n")
    agent = launcher.run("--nproc-per-node", 2, script)
    assert agent.wait() == 0, agent.output


@pytest.mark.again
def test_early_exit_with_0_while_others_need_it_is_reported_by_those(launcher, tmp_path):
    agent = launcher.run("--nproc-per-node", 2, "summing.py", tmp_path, 3, "1:1:exit0")
    assert agent.wait() == 1
    assert re.search(r"rank +: 0", agent.output.partition("Root cause")[2]), agent.output


@pytest.mark.again
def test_killed_agent_takes_everything_with_it(launcher, tmp_path, wait_for):
    agent = launcher.run("--nproc-per-node", 2, "children.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "pids")) == 4, "two workers and their children", agent)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    launcher.wait_until_empty()


def test_killed_zygote_fails_the_job_and_leaves_nobody(launcher, tmp_path, wait_for):
    agent = launcher.run("--nproc-per-node", 2, "children.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "pids")) == 4, "two workers and their children", agent)
    zygote = int(lines(tmp_path / "pids")[0][1])
    os.kill(zygote, signal.SIGKILL)
    assert agent.wait() == 1
    assert "SIGKILL" in agent.output


def test_children_of_a_dead_worker_are_killed(launcher, tmp_path, wait_for):
    agent = launcher.run("--nproc-per-node", 1, "children.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "pids")) == 2, "the worker and its child", agent)
    worker = int(lines(tmp_path / "pids")[0][0])
    os.kill(worker, signal.SIGKILL)
    assert agent.wait() == 1
    launcher.wait_until_empty()


@pytest.mark.again
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_agent_is_passed_on_and_ends_all(launcher, tmp_path, wait_for, signum):
    agent = launcher.run("--nproc-per-node", 2, "signals.py", tmp_path, "polite")
    wait_for(lambda: len(lines(tmp_path / "ready")) == 2, "two workers", agent)
    os.kill(agent.pid, signum)
    assert agent.wait() == 128 + signum
    assert sorted(lines(tmp_path / "got")) == [["0", str(int(signum))], ["1", str(int(signum))]]
    launcher.wait_until_empty()


def test_worker_that_ignores_the_signal_is_killed_after_the_timeout(launcher, tmp_path, wait_for):
    agent = launcher.run("--shutdown-timeout", 1, "signals.py", tmp_path, "deaf")
    wait_for(lambda: len(lines(tmp_path / "ready")) == 1, "the worker", agent)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    launcher.wait_until_empty()


def test_second_signal_kills_at_once(launcher, tmp_path, wait_for):
    agent = launcher.run("--shutdown-timeout", 3600, "signals.py", tmp_path, "deaf")
    wait_for(lambda: len(lines(tmp_path / "ready")) == 1, "the worker", agent)
    os.kill(agent.pid, signal.SIGINT)
    wait_for(lambda: lines(tmp_path / "got"), "the signal to be passed on", agent)
    os.kill(agent.pid, signal.SIGINT)
    assert agent.wait() == 128 + signal.SIGINT
    launcher.wait_until_empty()


def test_an_exit_is_noticed_when_it_happens_and_not_at_an_interval(launcher, tmp_path):
    """An agent that polled would look once an hour here."""
    words = ("--monitor-interval", 3600, "--nproc-per-node", 2, "--max-restarts", 1)
    agent = launcher.run(*words, "summing.py", tmp_path, 3, "1:1:kill")
    assert agent.wait() == 0, agent.output
    assert sorted(lines(tmp_path / "ends")) == [["0"], ["1"]]
