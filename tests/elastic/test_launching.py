"""The other ways to run a job: a function under ``elastic_launch``, several agents, the examples, the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import PRELOAD, SCRIPT, Cluster
from elastic_training import make_job, train
from tests.comm.stores.conftest import etcd_cluster

from phalanx.comm.stores import connect, job_store
from phalanx.elastic import RunOptions
from phalanx.elastic.audit import check_directory
from phalanx.protocol import NODES

pytestmark = pytest.mark.timeout(600)

EXAMPLES = Path(__file__).parents[2] / "examples"
LEASE = 20
"""Seconds; half of it is how long an agent may be held up before the others take it for dead."""


def run_function(num_steps: int) -> str:
    job = make_job(run=RunOptions(progress=False, threads=1))
    train(job, max_steps=num_steps)
    return job.digest()


def test_a_function_under_elastic_launch():
    from phalanx.launch import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    assert set(elastic_launch(config, run_function)(5).values()) == {run_function(5)}


def start_agent(
    directory: Path,
    backend: str,
    endpoint: str,
    num_steps: int,
    nodes: str = "1:2",
    nproc: int = 1,
    flags: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "phalanx", "run", f"--nnodes={nodes}", f"--nproc-per-node={nproc}", "--on-failure=heal",
        f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two", f"--rdzv-conf=lease={LEASE}",
        f"--preload={PRELOAD}", "--console=plain", str(SCRIPT), str(directory), str(num_steps), "0.03", *flags,
    ]  # fmt: skip
    with (directory / "output").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory)


@contextmanager
def rendezvous(backend: str, directory: Path) -> Iterator[str]:
    """The endpoint of a rendezvous that no agent hosts."""
    if backend == "file":
        yield str(directory)
        return
    directory.mkdir()
    with etcd_cluster(1, directory) as (server,):
        yield server.url.removeprefix("etcd://")


@contextmanager
def several_agents(directory: Path) -> Iterator[tuple[Cluster, list[subprocess.Popen[bytes]]]]:
    """A place for agents that the test starts, ended with it, and the eyes of a cluster on what they do."""
    directory.mkdir()
    cluster = Cluster.__new__(Cluster)  # only for its eyes: it has one agent
    cluster.directory, cluster.output = directory, (directory / "output").open("wb")
    cluster.hold(10)  # until the test has done what it does to the agents
    agents: list[subprocess.Popen[bytes]] = []
    try:
        yield cluster, agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
        cluster.output.close()


def num_nodes(endpoint: str) -> int:
    """How many nodes are live by what the rendezvous at a directory says."""
    store = connect(f"file://{endpoint}")
    try:
        return len(job_store(store, "two").items(NODES))
    finally:
        store.close()


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


@pytest.mark.parametrize(
    ("backend", "seat"),
    [
        ("file", 1),
        ("etcd", 0),
        pytest.param("file", 0, marks=pytest.mark.soak),
        pytest.param("etcd", 1, marks=pytest.mark.soak),
    ],
)
def test_a_whole_node_dies_and_the_other_goes_on(tmp_path, backend, seat):
    """Two agents with one worker each; the agent of rank ``seat`` gets SIGKILL, and its worker dies with it.

    Rank 0's agent is the one that hosts the job's store where the rendezvous itself is not one.
    """
    directory, num_steps = tmp_path / "job", 40
    with (
        rendezvous(backend, tmp_path / "rendezvous") as endpoint,
        several_agents(directory) as (cluster, agents),
    ):
        agents += [start_agent(directory, backend, endpoint, num_steps) for _ in range(2)]
        cluster.process = agents[0]
        cluster.wait_workers(2)
        cluster.wait_step(8)
        seated = max(cluster.events("regrouped"), key=lambda r: (r["generation"], r["round"]))["workers"]
        above = ancestors(cluster.pids()[seated[seat]])
        victim = next(agent for agent in agents if agent.pid in above)
        survivor = next(agent for agent in agents if agent is not victim)
        victim.send_signal(signal.SIGKILL)
        cluster.release()
        assert survivor.wait(200) == 0, cluster.text()[-4000:]
    assert check_directory(directory / "logs").problems == []
    alone = make_job(run=RunOptions(progress=False))
    train(alone, max_steps=num_steps)
    assert cluster.digests() == {f"{num_steps} {alone.digest()}"}


@pytest.mark.soak  # waits for a lease; in one of three runs the third agent did not come: not explained yet
def test_below_the_minimum_the_survivor_waits_with_its_state(tmp_path):
    """Two nodes are the least; one is killed, and the other goes on from where it was when a third comes."""
    directory, num_steps = tmp_path / "job", 40
    endpoint = str(tmp_path / "rendezvous")
    with several_agents(directory) as (cluster, agents):
        agents += [start_agent(directory, "file", endpoint, num_steps, "2:2") for _ in range(2)]
        cluster.process = agents[0]
        cluster.wait_workers(2)
        cluster.wait_step(8)
        survivor = next(worker for worker, pid in cluster.pids().items() if agents[0].pid in ancestors(pid))
        agents[1].send_signal(signal.SIGKILL)
        cluster.wait_until(lambda: list(cluster.pids()) == [survivor], "death of the other node's worker")
        cluster.wait_until(lambda: num_nodes(endpoint) == 1, "end of the other node's lease")
        time.sleep(2.0)  # had the survivor gone on alone, it would have by now
        third = time.time()
        agents.append(start_agent(directory, "file", endpoint, num_steps, "2:2"))
        cluster.release()
        assert agents[0].wait(200) == 0, cluster.text()[-4000:]
        assert agents[2].wait(200) == 0, cluster.text()[-4000:]
    later = [event for event in cluster.events("regrouped") if event["generation"] > 0]
    assert later
    assert min(event["time"] for event in later) > third, "it went on below the minimum"
    assert check_directory(directory / "logs").problems == []
    alone = make_job(run=RunOptions(progress=False))
    train(alone, max_steps=num_steps)
    assert cluster.digests() == {f"{num_steps} {alone.digest()}"}
    assert (directory / f"digest-{survivor}").exists(), "the process that waited is the one that finished"


@pytest.mark.parametrize(
    "name",
    ["char_lm.py", *(pytest.param(name, marks=pytest.mark.soak) for name in ("image_classifier.py", "ddp_port.py"))],
)
def test_an_example_gives_the_same_digest_alone_and_on_two_workers(name, tmp_path):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
    arguments = {
        "char_lm.py": ["--steps=3"],
        "image_classifier.py": ["--epochs=1", "--samples=400"],
        "ddp_port.py": [],
    }[name]
    script = [str(EXAMPLES / name), *arguments]
    launcher = ["-m", "phalanx", "run", "--nproc-per-node=2", "--on-failure=heal", f"--preload={PRELOAD}"]
    launcher.append("--console=plain")
    found = []
    for prefix in ([], launcher):
        command = [sys.executable, *prefix, *script]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        found.append([line for line in done.stdout.splitlines() if " steps, " in line])
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_demo_ends_with_the_same_bits_and_a_report(tmp_path):
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps=90", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout
    assert "each exactly once" in (tmp_path / "report.html").read_text()
