"""Nodes that are given notice leave at the step boundary after it: nobody restarts, no step is computed twice."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import NUM_STEPS, Cluster, Node

from log_lines import read_lines
from phalanx.elastic.membership._leave import LeaveRequest, leave_signals
from phalanx.launch.events import JobRestarted, NodeNoticed, read_events

pytestmark = pytest.mark.timeout(400)

HOLD = 10
"""The step in which the notice comes."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    started: list[Cluster] = []

    def begin(num_workers: int, **options) -> Cluster:
        started.append(Cluster(tmp_path / "job", num_workers, NUM_STEPS, hold=HOLD, script_flag="--save", **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_a_noticed_node_is_out_within_one_step_and_a_spare_takes_its_place(start, undisturbed, tmp_path):
    """The noticed node has two workers, and serves the job's store: it stays to serve it, without workers."""
    notice = tmp_path / "notice"
    told = (f"--notice=file:{notice}", f"--log-dir={tmp_path / 'agent'}", "--rdzv-conf=is_host=true")
    other = Node(flags=("--rdzv-conf=is_host=false",))
    cluster = start(
        1, nodes=(Node(flags=("--nproc-per-node=2", *told)), other), nnodes="1:2", rdzv_backend="c10d",
        rdzv_id="notice", rdzv_endpoint=f"127.0.0.1:{free_port()}",
    )  # fmt: skip
    cluster.wait_workers(3)
    cluster.wait_step(HOLD)
    before = cluster.newest_round()
    cluster.add(other)
    cluster.wait_until(lambda: "this node is a spare" in cluster.text(), "the spare's arrival")
    notice.write_text("the rack is switched off")
    cluster.wait_until(lambda: len(cluster.events("left")) == 2, "the departure of two workers")
    cluster.wait_workers(2)
    after = cluster.newest_round()
    cluster.release()
    verdict = cluster.finish()

    leavers = {event["worker"] for event in cluster.events("left")}
    assert leavers == set(before) - set(after)
    assert len(set(after) - set(before)) == 1, "the spare's worker"
    assert {event["step"] for event in cluster.events("left")} == {HOLD + 1}, "the step of the notice was the last"
    for worker in leavers:
        computed = [line for line in read_lines(cluster.directory / "logs" / f"audit-{worker}.jsonl")
                    if line["kind"] == "slot"]  # fmt: skip
        assert max(line["step"] for line in computed) == HOLD
    assert verdict.num_dropped == 0, "no step was computed twice"
    assert max(event["generation"] for event in cluster.events("regrouped")) == 1, "one regroup for all of this"
    assert cluster.digests() == {undisturbed}
    assert cluster.events("resumed") == []
    assert {event["step"] % 5 for event in cluster.events("saved")} == {0}, "those that were due, none for the leavers"
    (path,) = (tmp_path / "agent").rglob("events.jsonl")
    events = read_events(path)
    assert [(e.source, e.reason) for e in events if isinstance(e, NodeNoticed)] == [
        ("file", "the rack is switched off")
    ]
    assert not [event for event in events if isinstance(event, JobRestarted)]
    assert "stays without workers until the others are done" in cluster.text()


@pytest.mark.soak
def test_when_all_are_given_notice_the_job_saves_and_the_exit_code_names_the_signal(start):
    """Slurm's way: a signal to everything in the agent's process group, some time before the end."""
    cluster = start(2, nodes=(Node(prefix=("setsid",), flags=("--notice=slurm",)),))
    cluster.wait_workers(2)
    cluster.wait_step(HOLD)
    os.killpg(cluster.process.pid, signal.SIGUSR1)
    assert cluster.process.wait(150) == 128 + signal.SIGUSR1, cluster.text()[-4000:]
    assert [event["step"] for event in cluster.events("left")] == [HOLD + 1] * 2
    assert max(event["step"] for event in cluster.events("saved")) == HOLD + 1
    assert "this node was given notice (slurm: the agent got SIGUSR1)" in cluster.text()


@pytest.mark.fast
def test_which_signals_ask_a_worker_to_leave_is_a_choice():
    assert leave_signals(None, {}) == (signal.SIGTERM,)
    assert leave_signals(None, {"PHALANX_LEAVE_SIGNAL": "SIGUSR2"}) == (signal.SIGTERM, signal.SIGUSR2)
    assert leave_signals((), {"PHALANX_LEAVE_SIGNAL": "SIGTERM"}) == ()
    with pytest.raises(
        ValueError, match="this worker's agent asks by SIGTERM; add it, or run with --leave-signal SIGUSR1"
    ):
        leave_signals(("SIGUSR1",), {"PHALANX_LEAVE_SIGNAL": "SIGTERM"})
    for nonsense in ("USR1", "SIGKILL"):
        with pytest.raises(ValueError, match="expected names of signals"):
            leave_signals((nonsense,), {})
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: heard.append(signum))
    try:
        request = LeaveRequest((signal.SIGUSR1,))
        with request.listen():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request.requested
            assert heard == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == [signal.SIGUSR1], "a second one is not polite any more"
    finally:
        signal.signal(signal.SIGUSR1, before)


def processes_under(pid: int) -> list[int]:
    """A process and all that come from it, as a scheduler counts those of a step."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found


def test_a_survivor_below_the_minimum_that_is_given_notice_saves_and_ends(start):
    """Slurm signals every process of a step. The worker, which waits for a generation that does not come, leaves
    without a place, with its state; its agent used to wait on for others, until it was killed."""
    first, second = (
        Node(flags=("--notice=slurm", f"--rdzv-conf=is_host={told},lease=4")) for told in ("true", "false")
    )
    cluster = start(
        1, nodes=(first, second), nnodes="2", rdzv_backend="c10d", rdzv_id="few",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
    )  # fmt: skip
    cluster.wait_workers(2)
    cluster.wait_step(HOLD)
    cluster.agents[1].kill()
    cluster.wait_until(lambda: "waiting for 1 more node" in cluster.text(), "the survivor's waiting")
    for pid in reversed(processes_under(cluster.process.pid)):  # the agent last: by then the others could be dead
        os.kill(pid, signal.SIGUSR1)
    assert cluster.process.wait(150) == 128 + signal.SIGUSR1, cluster.text()[-4000:]
    (left,) = [event["step"] for event in cluster.events("left")]
    assert left in (HOLD, HOLD + 1), "the step in which the other was killed is committed by both or by none"
    assert max(event["step"] for event in cluster.events("saved")) == left
    assert "Traceback" not in cluster.text()


@pytest.mark.soak  # 40 s; of the agent alone: tests/launch/test_ends.py
def test_a_noticed_node_below_the_minimum_ends_at_once_and_another_goes_on_with_its_work(start, undisturbed, tmp_path):
    """The others cannot go on without it, and its agent used to wait at the exit barrier until they were done."""
    notice = tmp_path / "notice"
    first, second = (Node(flags=(f"--rdzv-conf=is_host={told}",)) for told in ("true", "false"))
    noticed = Node(flags=(*second.flags, f"--notice=file:{notice}"))
    cluster = start(
        1, nodes=(first, noticed), nnodes="2", rdzv_backend="c10d", rdzv_id="alone",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
    )  # fmt: skip
    cluster.wait_workers(2)
    cluster.wait_step(HOLD)
    notice.write_text("the rack is switched off")
    assert cluster.agents[1].wait(150) == 0, cluster.text()[-4000:]
    cluster.agents.pop(1)
    cluster.wait_until(lambda: "waiting for 1 more node" in cluster.text(), "the other's waiting")
    cluster.add(second)
    cluster.wait_workers(2)
    cluster.release()
    verdict = cluster.finish()
    assert verdict.num_dropped == 0, "no step was computed twice"
    assert cluster.digests() == {undisturbed}


@pytest.mark.soak
def test_when_all_nodes_of_a_job_of_fixed_size_are_given_notice_it_saves_and_all_end(start):
    """None of them waits for another in the place of one that has left first."""
    nodes = [Node(flags=("--notice=slurm", f"--rdzv-conf=is_host={told}")) for told in ("true", "false")]
    cluster = start(
        1, nodes=nodes, nnodes="2", rdzv_backend="c10d", rdzv_id="all", rdzv_endpoint=f"127.0.0.1:{free_port()}"
    )
    cluster.wait_workers(2)
    cluster.wait_step(HOLD)
    for agent in cluster.agents:
        os.kill(agent.pid, signal.SIGUSR1)
    assert [agent.wait(150) for agent in cluster.agents] == [128 + signal.SIGUSR1] * 2, cluster.text()[-4000:]
    steps = [event["step"] for event in cluster.events("left")]
    assert len(steps) == 2
    assert max(event["step"] for event in cluster.events("saved")) == max(steps)
