"""Faults in real processes, one agent: what the job does, what is reported, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.launch.conftest import complete_rows as lines

from phalanx.launch.system._linux import children_of, process_state

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
    agent = launcher.run("--nproc-per-node", 3, "--max-restarts", 1, "summing.py", tmp_path, 4, "0:2:kill", "2:2:kill")
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


def test_the_root_cause_is_named_though_its_end_is_noticed_last(launcher, tmp_path, wait_for):
    """The process that notices ends is stopped, until the victim's peer has complained and ended too."""
    agent = launcher.run("--nproc-per-node", 2, "for_ever.py", tmp_path)
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


def test_a_killed_zygote_is_replaced_and_its_workers_go_on(launcher, tmp_path, wait_for):
    """Then a worker dies: its end is noticed, and the successor starts another. Then the agent: nobody is left."""
    words = ("--nproc-per-node", 2, "--on-failure", "heal", "healing.py", tmp_path, 100000)
    agent = launcher.run(*words)

    def workers() -> dict[str, list[list[str]]]:
        return {path.name: lines(path) for path in tmp_path.glob("*.*.*") if lines(path)}

    def have_steps(names: set[str], after: int = 0) -> bool:
        return all(len(workers().get(name, ())) > after + 5 for name in names)

    wait_for(lambda: len(workers()) == 2 and have_steps(set(workers())), "two workers", agent)
    first = {name: int(rows[0][1]) for name, rows in workers().items()}
    (zygote,) = (pid for pid in children_of(agent.pid) if set(first.values()) <= set(children_of(pid)))
    os.kill(zygote, signal.SIGKILL)
    known = max(len(rows) for rows in workers().values())
    wait_for(lambda: have_steps(set(first), known), "the workers to go on", agent)
    victim = next(iter(first))
    os.kill(first[victim], signal.SIGKILL)
    wait_for(lambda: len(workers()) == 3 and have_steps(set(workers()) - {victim}), "a new worker", agent)
    assert "killed by SIGKILL" in agent.output, agent.output
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    launcher.wait_until_empty()


@pytest.mark.parametrize("method", ["warm", "exec"])
def test_who_kills_the_zygote_and_the_agent_leaves_nobody(launcher, tmp_path, wait_for, method):
    agent = launcher.run("--nproc-per-node", 2, "--start-method", method, "children.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "pids")) == 4, "two workers and their children", agent)
    zygote = int(lines(tmp_path / "pids")[0][1])
    os.kill(zygote, signal.SIGKILL)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    launcher.wait_until_empty()


def test_workers_of_a_killed_zygote_end_with_their_own_exit_codes(launcher, tmp_path, wait_for):
    script, ready = tmp_path / "ends.py", tmp_path / "ready"
    script.write_text(
        "import os, sys, time\n"
        "with open(sys.argv[1], 'a') as file:\n    file.write(f'{os.getppid()}\\n')\n"
        "while not os.path.exists(sys.argv[1] + '.end'):\n    time.sleep(0.01)\n"
        "sys.exit(7 if os.environ['RANK'] == '1' and sys.argv[2] == 'fails' else 0)\n"
    )
    for how, code in (("fails", 1), ("ends", 0)):
        agent = launcher.run("--nproc-per-node", 2, script, f"{ready}-{how}", how)
        wait_for(lambda how=how: len(lines(tmp_path / f"ready-{how}")) == 2, "two workers", agent)
        os.kill(int(lines(tmp_path / f"ready-{how}")[0][0]), signal.SIGKILL)
        wait_for(lambda agent=agent: "another is started" in agent.output, "the loss to be noticed", agent)
        (tmp_path / f"ready-{how}.end").touch()
        assert agent.wait() == code, agent.output
        assert ("exitcode  : 7" in agent.output) == (how == "fails"), agent.output
    launcher.wait_until_empty()


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
