"""How jobs end: nodes that leave early, a rendezvous that is closed in the middle, and a job that is run again."""

from __future__ import annotations

import os
import signal

import pytest
from tests.launch.conftest import complete_rows as lines

from phalanx.comm.stores import connect
from phalanx.comm.stores._signing import Signer
from phalanx.launch.rendezvous._store_records import ring
from phalanx.protocol import CLOSED, Closing, job_prefix

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("backend", ["file", "c10d"])
@pytest.mark.parametrize("outcome", ["end", "fail"])
def test_a_node_whose_workers_end_after_another_node_has_left(
    launcher, tmp_path, held_port, wait_for, backend, outcome
):
    """The other worker ends well later, or fails when nobody is left to restart with; an agent that serves stays."""
    endpoint = str(tmp_path / "rendezvous") if backend == "file" else f"127.0.0.1:{held_port}"
    agents = [launcher.script("early_leaver.py", backend, endpoint, tmp_path) for _ in range(2)]
    wait_for(lambda: len(lines(tmp_path / "starts")) == 2, "two workers", agents[0])
    first, late = (1, 0) if backend == "file" else (0, 1)
    (tmp_path / f"end-{first}").touch()
    if backend == "file":
        wait_for(lambda: any(agent.has_ended for agent in agents), "one agent to leave")
    else:  # rank 0's agent serves the workers' store, and maybe the rendezvous
        wait_for(lambda: any("stays until they are done" in agent.output for agent in agents), "the barrier")
    (tmp_path / f"{outcome}-{late}").touch()
    if backend == "c10d":
        (tmp_path / "end").touch()  # for the restart, which has both nodes
    codes = sorted(agent.wait() for agent in agents)
    shown = [agent.output for agent in agents]
    num_starts = [int(rank) for rank, _, _ in lines(tmp_path / "starts")].count(late)
    if outcome == "end" or backend == "c10d":
        assert codes == [0, 0], shown
        assert num_starts == 1 + (outcome == "fail")
    else:
        assert codes == [0, 1], shown
        assert "1 node has finished and left" in "".join(shown), shown
    launcher.wait_until_empty()


def test_a_noticed_node_without_which_too_few_are_left_ends_and_another_takes_its_place(launcher, tmp_path, wait_for):
    """Its agent used to wait until the others, which cannot go on without it, were done."""
    words = ("--nnodes", 2, "--rdzv-backend", "file", "--rdzv-endpoint", tmp_path / "rendezvous", "--rdzv-id", "two",
             "--on-failure", "heal")  # fmt: skip
    notice = tmp_path / "notice"
    other = launcher.run(*words, "until.py", tmp_path)
    noticed = launcher.run(*words, f"--notice=file:{notice}", "until.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "starts")) == 2, "two workers", other)
    notice.write_text("it is time")
    assert noticed.wait() == 1, noticed.output
    assert "this node was given notice (file: it is time)" in noticed.output
    wait_for(lambda: "waiting for 1 more node" in other.output, "the other's waiting", other)
    assert len(lines(tmp_path / "starts")) == 2, "nothing was started again on the noticed node"
    third = launcher.run(*words, "until.py", tmp_path)
    wait_for(lambda: len(lines(tmp_path / "starts")) == 4, "a generation with the third", other)
    (tmp_path / "end").touch()
    assert [agent.wait() for agent in (other, third)] == [0, 0], (other.output, third.output)


@pytest.mark.parametrize("policy", ["restart", "heal"])
def test_a_rendezvous_that_is_closed_in_the_middle_is_no_success(launcher, tmp_path, wait_for, policy):
    directory = tmp_path / "rendezvous"
    agent = launcher.run(
        "--rdzv-backend", "file", "--rdzv-endpoint", directory, "--rdzv-id", "closing", "--on-failure", policy,
        "until.py", tmp_path,
    )  # fmt: skip
    wait_for(lambda: lines(tmp_path / "starts"), "a worker", agent)
    with connect(directory.as_uri()) as store:
        job = store.namespace(job_prefix("closing"))
        job.set(CLOSED, Closing(reason="closed by a stranger").to_json())
        ring(job, Signer("closing"))
    assert agent.wait() == 1, agent.output
    assert "closed by a stranger" in agent.output
    assert "has not finished" in agent.output
    launcher.wait_until_empty()


def test_a_job_that_has_ended_is_run_anew_under_the_same_id(launcher, tmp_path, wait_for):
    words = (
        "--rdzv-backend", "file", "--rdzv-endpoint", tmp_path / "rendezvous", "--rdzv-id", "again",
        "--rdzv-conf", "close_timeout=1",
    )  # fmt: skip
    (tmp_path / "fail-0").touch()
    assert launcher.run(*words, "until.py", tmp_path).wait() == 1
    (tmp_path / "end").touch()
    assert launcher.run(*words, "until.py", tmp_path).wait() == 0, "what failed can be run again at once"
    assert len(lines(tmp_path / "ends")) == 1
    late = launcher.run(*words, "--rdzv-conf", "close_timeout=300", "until.py", tmp_path)
    assert late.wait() == 0, late.output
    assert "has ended" in late.output
    assert "computes nothing" in late.output
    assert len(lines(tmp_path / "ends")) == 1
    agent = launcher.run(*words, "--rdzv-conf", "close_timeout=0", "until.py", tmp_path)
    assert agent.wait() == 0, agent.output
    assert len(lines(tmp_path / "ends")) == 2, "a job that was run before is computed again"
    assert [generation for _, _, generation in lines(tmp_path / "starts")] == ["0", "0", "0"]


def test_the_loss_of_an_agent_is_no_end(launcher, tmp_path, wait_for):
    """All agents of a job are killed: who comes later goes on with it, and does not begin another run."""
    words = ("--rdzv-backend", "file", "--rdzv-endpoint", tmp_path / "rendezvous", "--rdzv-id", "on")
    agent = launcher.run(*words, "--rdzv-conf", "lease=2", "until.py", tmp_path)
    wait_for(lambda: lines(tmp_path / "starts"), "a worker", agent)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    (tmp_path / "end").touch()
    later = launcher.run(*words, "until.py", tmp_path)
    assert later.wait() == 0, later.output
    assert [generation for _, _, generation in lines(tmp_path / "starts")] == ["0", "1"]
