"""A job on Ray: which agents are started, what their ends mean; on a real cluster of Ray, nodes that come and go."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.elastic.cluster import Cluster, Node
from tests.hosts.box import Host, new_box
from tests.hosts.jobs import undisturbed

from phalanx.integrations._ray_agents import AgentEnd, Agents
from phalanx.integrations.ray import run

DRIVER = Path(__file__).with_name("ray_driver.py")
NUM_STEPS = 12

ends = st.builds(AgentEnd, st.sampled_from([None, -9, 143, 137]), st.just("gone"))


@pytest.mark.fast
@given(st.integers(1, 6), st.lists(ends, max_size=20))
def test_as_many_agents_are_under_way_as_the_job_may_have_whoever_is_lost(most, losses):
    agents = Agents(max_nodes=most, max_losses=len(losses))
    agents = agents.started(agents.num_to_start)
    for end in losses:
        agents = agents.after(end)
        assert agents.num_to_start == 1
        agents = agents.started(agents.num_to_start)
        assert (agents.num_under_way, agents.num_to_start) == (most, 0)
    assert agents.num_lost == len(losses)
    assert not agents.is_over
    assert "the last one: gone" in agents.after(AgentEnd(None, "gone")).failure


@pytest.mark.fast
@pytest.mark.parametrize("code", [1, 2, 93])
def test_an_agent_that_ends_by_itself_says_how_the_job_ended(code):
    agents = Agents(max_nodes=3, max_losses=9, num_under_way=3)
    assert agents.after(AgentEnd(0)).is_done
    failed = agents.after(AgentEnd(code))
    assert f"exit code {code}" in failed.failure
    for over in (failed, agents.after(AgentEnd(0))):
        assert over.num_to_start == 0, "nobody is started for a job that is over"
        for late in (0, 1, None):
            assert over.after(AgentEnd(late)).failure == over.failure, "the first one has said it"


@pytest.mark.fast
@pytest.mark.parametrize("nodes", [(0, 1), (3, 2)])
def test_a_number_of_nodes_that_cannot_be_is_refused_before_ray_is_asked(nodes):
    with pytest.raises(ValueError, match="MIN <= MAX"):
        run([], nodes=nodes)


class RayJob(Cluster):
    """A driver on a host in a box: Ray listens on all addresses of the machine that it is on."""

    def __init__(self, directory: Path, host: Host) -> None:
        directory.mkdir()
        self.have_nodes(directory, 2)
        super().__init__(directory, 1, NUM_STEPS, hold=3, nodes=[Node(prefix=tuple(host.inside()))])

    def add(self, node: Node) -> None:
        words = [sys.executable, str(DRIVER), str(self.directory), "3", *self._flags, *self._command]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.agents.append(
            subprocess.Popen(
                [*node.prefix, *words], stdout=self.output, stderr=subprocess.STDOUT, cwd=self.directory,
                env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self.scratch)},
            )
        )  # fmt: skip

    @staticmethod
    def have_nodes(directory: Path, count: int) -> None:
        (directory / ".nodes").write_text(str(count))
        (directory / ".nodes").rename(directory / "nodes")


@pytest.mark.soak  # half a minute, and Ray is no part of what is installed for tests
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed: pip install -e .[ray]")
@pytest.mark.timeout(500)
def test_a_job_follows_the_nodes_of_a_ray_cluster_up_and_down(tmp_path):
    expected = undisturbed(tmp_path / "quiet", NUM_STEPS)
    with new_box(1) as box:
        job = RayJob(tmp_path / "job", box.hosts[0])
        try:
            job.wait_workers(2)
            job.wait_step(3)
            job.have_nodes(job.directory, 1)
            job.wait_workers(1)
            job.hold(6)
            job.wait_step(6)
            job.have_nodes(job.directory, 3)
            job.wait_workers(3)
            job.release()
            verdict = job.finish(timeout=300)
            assert verdict.num_steps == NUM_STEPS
            assert job.digests() == {expected}
        finally:
            for agent in job.agents:
                agent.kill()
                agent.wait(60)
            job.output.close()
