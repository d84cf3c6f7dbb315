"""What healing alone does not cure, with real processes: scripts that cannot regroup, crash loops, a taken port."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest
from tests.launch.conftest import complete_rows as lines

from phalanx.launch.events import LimitReached, read_events

pytestmark = pytest.mark.timeout(300)

HEAL = ("--on-failure", "heal")


def test_a_script_that_cannot_regroup_starts_anew(launcher, tmp_path):
    agent = launcher.run("--nproc-per-node", 3, *HEAL, "summing.py", tmp_path, 4, "1:2:kill")
    assert agent.wait() == 0, agent.output
    starts = sorted((generation, rank) for generation, _, rank, _, _ in lines(tmp_path / "starts"))
    assert starts == [(str(g), str(rank)) for g in (0, 1) for rank in range(3)]
    assert sorted(lines(tmp_path / "ends")) == [["0"], ["1"], ["2"]]
    assert agent.output.count("no worker has said that it can regroup") == 1, agent.output
    launcher.wait_until_empty()


def test_of_a_script_that_cannot_regroup_the_first_cause_is_reported(launcher, tmp_path):
    words = ("--nproc-per-node", 3, *HEAL, "--max-restarts", 0)
    agent = launcher.run(*words, "summing.py", tmp_path, 4, "1:2:kill")
    assert agent.wait() == 1
    assert len(lines(tmp_path / "starts")) == 3
    report = agent.output.partition("Root cause (the earliest failure):")[2]
    assert "exitcode  : -9 (SIGKILL)" in report.partition("Other failures")[0], agent.output


def test_a_node_that_joins_a_script_that_cannot_regroup_makes_all_start_anew(launcher, tmp_path, wait_for, held_port):
    words = (
        "--nnodes", "1:2", *HEAL, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}",
        "--rdzv-id", "grows", "--rdzv-conf", "last_call_timeout=0,admit_delay=0", "summing.py", tmp_path, 100000,
    )  # fmt: skip
    first = launcher.run(*words, STEP_SECONDS="0.01")
    wait_for(lambda: lines(tmp_path / "starts"), "the first node", first)
    second = launcher.run(*words, STEP_SECONDS="0.01")
    wait_for(
        lambda: {tuple(row[2:4]) for row in lines(tmp_path / "starts")} >= {("0", "2"), ("1", "2")},
        "two",
        second,
    )
    (tmp_path / "end").touch()
    assert first.wait() == second.wait() == 0, first.output + second.output
    launcher.wait_until_empty()


CRASHES = """
import os, sys
from phalanx import membership as m
from phalanx.comm.stores import connect, job_store

if "regroups" in sys.argv:
    store = job_store(connect(os.environ[m.ENV_STORE]), os.environ[m.ENV_JOB])
    store.set(m.regroups_key(os.environ[m.ENV_WORKER_ID]), b"1")
with open(sys.argv[1], "a") as file:
    file.write(os.environ["RANK"] + "\\n")
undefined_name
"""


@pytest.mark.parametrize("kind", ["plain", "regroups"])
def test_replacements_that_crash_one_after_the_other_end_the_job(launcher, tmp_path, kind):
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    agent = launcher.run("--nproc-per-node", 2, *HEAL, script, tmp_path / "starts", kind)
    assert agent.wait() == 1
    # The first two, and three times again; beside each that counts one may die that was started before the last did.
    assert len(lines(tmp_path / "starts")) <= 2 + 3 * 3, agent.output
    assert "3 replacements in a row died without a step of their own" in agent.output, agent.output
    assert "NameError" in agent.output.partition("Root cause")[2].partition("Other failures")[0]
    launcher.wait_until_empty()


BAD_SAMPLE = """
import atexit, sys, time, torch
import phalanx

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 40:
            open(sys.argv[1], "a").write("bad\\n")
            atexit.register(time.sleep, 0.5)  # who only complains of it ends before it does
            raise ValueError("sample 40 is bad")
        return torch.ones(2), torch.ones(1)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = phalanx.elastic.DataOptions(shuffle=False)
saves = phalanx.elastic.Saves(directory=sys.argv[1] + "-saves", every=1)
job = phalanx.Job(model, optimizer, Samples(), num_slots=2, slot_batch_size=4, data=data, saves=saves)
for step in job.steps(epochs=1):
    for micro in step:
        micro.backward((model(micro.inputs) - micro.targets).pow(2).mean())
    step.commit()
"""


@pytest.mark.parametrize("policy", [HEAL, ("--max-restarts", 50)], ids=["heal", "restart"])
def test_a_sample_that_kills_whoever_reads_it_ends_the_job(launcher, tmp_path, policy):
    """Five steps are committed before it; then no more, whoever tries."""
    script = tmp_path / "bad_sample.py"
    script.write_text(BAD_SAMPLE)
    agent = launcher.run("--nproc-per-node", 2, *policy, f"--log-dir={tmp_path / 'log'}", script, tmp_path / "tries")
    assert agent.wait() == 1
    (path,) = (tmp_path / "log").rglob("events.jsonl")
    limits = [event.limit for event in read_events(path) if isinstance(event, LimitReached)]
    assert set(limits) == {"progress"}  # under heal maybe twice: the other worker goes on alone, and comes to it too
    told = (
        r"step 5, slot 0, samples 40, 41, 42, 43 failed on workers (\S+, )+\S+: the code or the data \(all of them ran"
    )
    assert re.search(told, agent.output), agent.output
    assert "sample 40 is bad" in agent.output.partition("Root cause")[2]
    assert len(lines(tmp_path / "tries")) <= 8
    launcher.wait_until_empty()


@pytest.mark.timeout(300)
def test_one_place_that_fails_on_two_machines_is_the_code_or_the_data(launcher, tmp_path, held_port):
    """The third failure ends the job: no node is at fault that could be left out."""
    script = tmp_path / "bad_sample.py"
    script.write_text(BAD_SAMPLE)
    words = (
        "run", "--nnodes", 2, *HEAL, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}",
        "--rdzv-id", "two", "--local-addr", "127.0.0.1", script, tmp_path / "tries",
    )  # fmt: skip
    agents = [launcher.script("named_agent.py", name, *words) for name in ("first", "second")]
    assert [agent.wait() for agent in agents] == [1, 1]
    told = (
        r"step 5, slot 0, samples 40, 41, 42, 43 failed on workers (\S+, )+\S+: the code or the data, not the machine"
    )
    for agent in agents:
        found = re.search(told, agent.output)
        assert found, agent.output
        assert "first." in found.group()
        assert "second." in found.group()
    assert len(lines(tmp_path / "tries")) == 3
    launcher.wait_until_empty()


def test_a_taken_master_port_is_said_at_once_with_its_holder(launcher, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        agent = launcher.run("--master-port", port, "summing.py", tmp_path, 1)
        assert agent.wait() == 1
    last = agent.output.rstrip().splitlines()[-1]
    assert last.startswith(f"phalanx run: port {port} of 127.0.0.1"), agent.output
    assert f"taken by pid {os.getpid()} " in last
    assert "--master-port" in last
    assert not (tmp_path / "starts").exists()
    launcher.wait_until_empty()


def test_a_master_port_serves_every_generation(launcher, tmp_path, held_port):
    words = ("--nproc-per-node", 2, "--master-port", held_port, "--max-restarts", 1)
    agent = launcher.run(*words, "summing.py", tmp_path, 4, "1:2:kill")
    assert agent.wait() == 0, agent.output
    assert len(lines(tmp_path / "ends")) == 2


def test_an_endpoint_that_a_stranger_has_is_said_before_the_rendezvous_times_out(launcher, tmp_path):
    """torch's client would wait for ever for this listener, which accepts and says nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        endpoint = ("--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-backend")
        agents = [launcher.run(*endpoint, backend, "summing.py", tmp_path, 1) for backend in ("static", "c10d")]
        assert [agent.wait() for agent in agents] == [1, 1]
    for agent in agents:
        assert re.search(rf"port {port} .*taken by pid {os.getpid()} ", agent.output), agent.output


SLOW_START = """
import os, signal, sys, time, torch
import phalanx

if os.environ["PHALANX_GENERATION"] != "0":
    time.sleep(6)  # as one that imports, or reads its data
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
job = phalanx.Job(model, optimizer, data, num_slots=2, slot_batch_size=4)
for step in job.steps(max_steps=100_000):
    for micro in step:
        micro.backward((model(micro.inputs) - micro.targets).pow(2).mean())
    if os.environ["PHALANX_GENERATION"] == "0" and job.rank == 1 and step.number == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    step.commit()
    time.sleep(0.02)
    if os.environ["PHALANX_GENERATION"] != "0":
        open(sys.argv[1], "w").close()
"""


def test_a_worker_that_starts_slowly_is_not_taken_for_one_that_hangs(launcher, tmp_path, wait_for):
    script, joined = tmp_path / "slow_start.py", tmp_path / "joined"
    script.write_text(SLOW_START)
    agent = launcher.run("--nproc-per-node", 2, *HEAL, "--hang-timeout", 2, script, joined)
    wait_for(joined.exists, "the slow worker's first step", agent)
    assert "no progress" not in agent.output, agent.output
    os.kill(agent.pid, signal.SIGTERM)
    agent.wait()
    launcher.wait_until_empty()
