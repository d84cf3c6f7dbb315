"""A sharded job on two nodes: copies of a cell lie on both, so a whole node may die."""

from __future__ import annotations

import signal

import pytest
from elastic_training import make_job, train
from test_launching import ancestors, several_agents, start_agent

from phalanx.elastic import RunOptions
from phalanx.elastic.audit import check_directory

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]


def test_a_whole_node_dies_and_no_step_is_lost(tmp_path):
    """Two agents with two workers each and no saves; one agent gets SIGKILL, and its workers die with it."""
    directory, num_steps = tmp_path / "job", 16
    endpoint = str(tmp_path / "rendezvous")
    with several_agents(directory) as (cluster, agents):
        for _ in range(2):
            agents.append(start_agent(directory, "file", endpoint, num_steps, nproc=2, flags=("--copies=2",)))
        cluster.process = agents[0]
        cluster.wait_workers(4)
        cluster.wait_step(8)
        agent_of = {
            worker: next(agent for agent in agents if agent.pid in ancestors(pid))
            for worker, pid in cluster.pids().items()
        }
        newest = cluster.newest_round()
        held = [event for event in cluster.events("cells_held") if event["worker"] in newest]
        assert len(held) >= 4
        for event in held[-4:]:
            assert event["unprotected"] == 0
            assert all(agent_of[other] is not agent_of[event["worker"]] for other in event["mirrors"])
        agents[1].send_signal(signal.SIGKILL)
        cluster.release()
        assert agents[0].wait(200) == 0, cluster.text()[-4000:]
    assert cluster.events("went_back") == []
    verdict = check_directory(directory / "logs")
    assert (verdict.problems, verdict.num_steps) == ([], num_steps)
    alone = make_job(run=RunOptions(progress=False, threads=1))
    train(alone, max_steps=num_steps)
    assert cluster.digests() == {f"{num_steps} {alone.digest()}"}
