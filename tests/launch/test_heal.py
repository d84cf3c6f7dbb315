"""The heal policy with real processes: survivors keep their processes, the dead are replaced, the count changes."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
from tests.launch.conftest import complete_rows

from phalanx.launch.cli._scale import main as scale_main

pytestmark = pytest.mark.timeout(400)

FLAGS = ("--on-failure", "heal")


class Story:
    """What the workers of a healing.py job wrote, by worker id in the order of their start."""

    def __init__(self, directory: Path) -> None:
        self.lines: dict[str, list[list[str]]] = {}
        for path in directory.glob("*.*.*"):
            self.lines[path.name] = complete_rows(path)

    def starts(self) -> list[int]:
        return [int(lines[0][1]) for lines in self.lines.values()]

    def steps(self, worker_id: str) -> list[tuple[int, ...]]:
        return [tuple(map(int, line)) for line in self.lines[worker_id] if line[0].isdigit()]

    def finished(self) -> list[str]:
        return [worker_id for worker_id, lines in self.lines.items() if lines[-1][0] == "finished"]

    def last_sizes(self) -> set[int]:
        return {self.steps(worker_id)[-1][3] for worker_id in self.finished()}


def check_sums(story: Story) -> None:
    for worker_id in story.lines:
        for _, _, _, size, total in story.steps(worker_id):
            assert total == size * (size - 1) // 2, worker_id


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.mark.again
@pytest.mark.parametrize(
    ("fault", "num_dead"),
    [("0:5:kill", 1), ("1:5:raise", 1), ("1:5:kill+2", 2)],
    ids=["rank 0 killed", "one raises", "two at once"],
)
def test_the_dead_are_replaced_and_survivors_keep_their_process(launcher, out, fault, num_dead):
    agent = launcher.run("--nproc-per-node", 3, *FLAGS, "healing.py", out, 12, fault)
    assert agent.wait() == 0, agent.output
    story = Story(out)
    check_sums(story)
    assert len(story.lines) == 3 + num_dead
    assert len(story.finished()) == 3
    assert story.last_sizes() == {3}
    for worker_id in story.finished():  # every step once, whoever regrouped in between
        done = [step for _, step, *_ in story.steps(worker_id)]
        assert done == list(range(done[0], 12))
    originals = [worker_id for worker_id in story.finished() if story.steps(worker_id)[0][1] == 0]
    assert len(originals) == 3 - num_dead
    launcher.wait_until_empty()


def test_without_restarts_left_the_job_goes_on_with_fewer(launcher, out):
    agent = launcher.run("--nproc-per-node", 3, *FLAGS, "--max-restarts", 0, "healing.py", out, 12, "1:5:kill")
    assert agent.wait() == 0, agent.output
    story = Story(out)
    check_sums(story)
    assert len(story.lines) == 3
    assert story.last_sizes() == {2}
    assert "going on with fewer" in agent.output


def test_the_last_worker_cannot_be_spared(launcher, out):
    agent = launcher.run(*FLAGS, "--max-restarts", 0, "healing.py", out, 12, "0:5:kill")
    assert agent.wait() == 1
    assert "SIGKILL" in agent.output.partition("Root cause")[2]


def test_a_polite_leaver_is_no_failure_and_not_replaced(launcher, out):
    agent = launcher.run("--nproc-per-node", 3, *FLAGS, "healing.py", out, 12, "1:5:leave")
    assert agent.wait() == 0, agent.output
    story = Story(out)
    assert len(story.lines) == 3
    assert story.last_sizes() == {2}


def test_scale_up_and_down_while_running(launcher, out, wait_for, held_port):
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{held_port}", "--rdzv-id", "scaling")
    agent = launcher.run(
        "--nproc-per-node", 2, "--rdzv-backend", "c10d", *endpoint, *FLAGS, "--standby", 1, "healing.py", out, 100000,
    )  # fmt: skip

    def scale(size: int) -> None:
        assert scale_main([*endpoint, "--nproc", str(size)]) == 0

    def sizes() -> set[int]:
        story = Story(out)
        return {story.steps(worker_id)[-1][3] for worker_id in story.lines if story.steps(worker_id)}

    wait_for(lambda: sizes() == {2}, "two workers", agent)
    scale(3)
    wait_for(lambda: sizes() == {3} and len(Story(out).lines) == 3, "three workers", agent)
    scale(1)
    wait_for(lambda: 1 in sizes(), "one worker", agent)
    story = Story(out)
    check_sums(story)
    assert "lost" not in {
        line[0] for line in story.lines[min(story.lines)] if line[1] == "0"
    }  # grew at a step boundary
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    launcher.wait_until_empty()


def test_a_hanging_worker_is_diagnosed_and_replaced(launcher, out, tmp_path):
    agent = launcher.run(
        "--nproc-per-node", 2, *FLAGS, "--hang-timeout", 15, "--log-dir", tmp_path / "logs", "healing.py", out, 12,
        "1:5:hang",
    )  # fmt: skip
    assert agent.wait() == 0, agent.output
    # The other one is silent too, but only waits for this one: it is not taken for it.
    assert re.search(r"rank 1 made no progress for 15 s.* it is in fault \(healing.py:\d+\)", agent.output), (
        agent.output
    )
    assert not re.search(r"rank 0 made no progress.*it is killed", agent.output), agent.output
    dumps = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("attempt_0/*/stacks.log")}
    assert set(dumps) == {"0", "1"}
    assert "in fault" in dumps["1"]  # the very function that hangs
    assert len(Story(out).finished()) == 2


def test_a_job_with_a_secret_heals_and_is_scaled_only_by_who_knows_it(
    launcher, out, tmp_path, wait_for, monkeypatch, capsys, held_port
):
    """Agents and workers sign and verify: only the agent is told the secret's file, its workers get it from there."""
    secret = tmp_path / "secret"
    secret.write_text("hush")
    secret.chmod(0o600)
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{held_port}", "--rdzv-id", "secretive")
    agent = launcher.run(
        "--nproc-per-node", 2, "--rdzv-backend", "c10d", *endpoint, "--rdzv-conf", f"secret_file={secret}", *FLAGS,
        "healing.py", out, 100000, "1:5:kill",
    )  # fmt: skip

    def sizes() -> set[int]:
        story = Story(out)
        return {story.steps(worker_id)[-1][3] for worker_id in story.lines if len(story.steps(worker_id)) > 8}

    wait_for(lambda: len(Story(out).lines) == 3 and sizes() == {2}, "the dead worker to be replaced", agent)
    assert scale_main([*endpoint, "--nproc", "3"]) == 2
    assert "set PHALANX_JOB_SECRET" in capsys.readouterr().err
    monkeypatch.setenv("PHALANX_JOB_SECRET", "guessed")
    assert scale_main([*endpoint, "--nproc", "3"]) == 2
    assert "no job 'secretive'" in capsys.readouterr().err
    monkeypatch.setenv("PHALANX_JOB_SECRET", "hush")
    assert scale_main([*endpoint, "--nproc", "3"]) == 0
    wait_for(lambda: 3 in sizes(), "three workers", agent)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    launcher.wait_until_empty()


def test_a_job_on_one_node_is_scaled_without_saying_which(launcher, out, tmp_path, wait_for, monkeypatch, capsys):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    agent = launcher.run("--nproc-per-node", 2, *FLAGS, "healing.py", out, 100000, TMPDIR=str(temporary))

    def sizes() -> set[int]:
        story = Story(out)
        return {story.steps(worker_id)[-1][3] for worker_id in story.lines if story.steps(worker_id)}

    wait_for(lambda: sizes() == {2}, "two workers", agent)
    assert scale_main(["--nproc", "3"]) == 0, capsys.readouterr().err
    wait_for(lambda: 3 in sizes(), "three workers", agent)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert scale_main(["--nproc", "3"]) == 2
    launcher.wait_until_empty()
