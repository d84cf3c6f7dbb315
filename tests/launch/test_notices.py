"""Notices in the agent: who asks, what is passed on, what an agent's end says of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from tests.preemption.metadata_services import Aws, Azure, Gcp, serving

from phalanx.launch.agent._departure import Departure
from phalanx.launch.agent._notices import NoticeWatch
from phalanx.launch.config._config import LaunchConfig
from phalanx.launch.config._worker_spec import RunResult, WorkerState
from phalanx.launch.system._signals import SignalException
from phalanx.preemption import AwsNotices, Notice, SourceProblem, parse_source

pytestmark = pytest.mark.fast


@dataclass
class Scripted:
    """A source that says one thing after the other, and then that there is no notice."""

    says: list[Notice | SourceProblem | Exception | None]
    name: str = "scripted"
    interval: float = 0.001
    is_through: threading.Event = field(default_factory=threading.Event)

    def look(self, now: float) -> Notice | None:
        if not self.says:
            self.is_through.set()
            return None
        found = self.says.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Heard:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.first = threading.Event()

    def __call__(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.first.set()


def test_the_first_notice_is_passed_on_and_no_problem_is_taken_for_one(caplog):
    heard = Heard()
    trouble = [SourceProblem("nobody there"), SourceProblem("still nobody"), None, RuntimeError("a bug"), None]
    source = Scripted([*trouble, Notice(source="scripted", reason="go")])
    watch = NoticeWatch([source], heard)
    with caplog.at_level(logging.WARNING):
        watch.start()
        assert heard.first.wait(30)
    watch.stop()
    assert [notice.reason for notice in heard.notices] == ["go"]
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "no telling" in line] == [
        "no telling whether there is a notice from scripted: nobody there. It is asked on"
    ]
    assert sum("can be asked for notices again" in line for line in said) == 1


def test_an_interruption_is_heard_of_from_a_service_that_was_away_at_first():
    cloud, heard = Aws(), Heard()
    with serving(cloud) as service:
        cloud.values["spot/instance-action"] = "<html>"
        watch = NoticeWatch([AwsNotices(endpoint=service.url, interval=0.01)], heard)
        watch.start()
        while len(service.asked) < 5:  # it is asked on
            time.sleep(0.005)
        assert heard.notices == []
        cloud.values["spot/instance-action"] = '{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
        assert heard.first.wait(30)
        watch.stop()
    assert [notice.reason for notice in heard.notices] == ["AWS will stop this instance"]


def test_the_first_signal_is_a_notice_and_the_second_means_what_it_always_does():
    heard = Heard()
    watch = NoticeWatch(["kubernetes:20", "slurm:SIGUSR1"], heard)
    assert set(watch.signals) == {signal.SIGTERM, signal.SIGUSR1}
    assert not watch.take_signal(signal.SIGINT)
    assert watch.take_signal(signal.SIGTERM)
    assert not watch.take_signal(signal.SIGTERM)
    assert not watch.take_signal(signal.SIGUSR1)
    (notice,) = heard.notices
    assert notice.source == "kubernetes"
    assert watch.signum is signal.SIGTERM


def left(departure: Departure, **codes: int) -> None:
    for name, code in codes.items():
        departure.note(SimpleNamespace(id=name, process=SimpleNamespace(exit_code=code)))  # type: ignore[arg-type]


def test_what_a_notice_means_for_the_end_of_an_agent():
    well = RunResult(WorkerState.SUCCEEDED, {0: 1})
    notice = Notice(source="file", reason="it is time")
    departure = Departure()
    left(departure, a=0)
    assert departure.conclude(well, None) is well, "there was no notice"
    assert departure.begin(notice)
    assert not departure.begin(notice)
    assert departure.conclude(well, signal.SIGTERM) is well, "nobody has left because of it: the job was done"
    left(departure, a=0)
    assert departure.conclude(well, None) is well
    with pytest.raises(SignalException) as raised:
        departure.conclude(well, signal.SIGUSR1)
    assert raised.value.sigval == signal.SIGUSR1
    left(departure, b=-15)
    failed = departure.conclude(well, None)
    assert failed.is_failed()
    (failure,) = failed.failures.values()
    assert "this node was given notice (it is time), and b cannot leave at a step boundary" in failure.message
    assert departure.is_due(is_finishing=lambda: False)
    assert not departure.is_due(is_finishing=lambda: True)


def test_the_configuration_refuses_what_makes_no_sense():
    def make(**fields) -> LaunchConfig:
        return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, **fields)

    make(on_failure="heal", notice=("aws", "file:/tmp/x", parse_source("gcp"), "call:not.imported:here"))
    with pytest.raises(ValueError, match="expected 'heal'"):
        make(notice=("aws",))
    with pytest.raises(ValueError, match="no source of notices"):
        make(on_failure="heal", notice=("amazon",))
    for nonsense in ("", "SIGTERM,SIGINT", "SIGNAL"):
        with pytest.raises(ValueError, match=r"expected (one name|names)"):
            make(leave_signal=nonsense)


def test_a_plain_script_that_is_given_notice_ends_with_an_error_that_says_why(launcher, tmp_path):
    notice = tmp_path / "notice"
    agent = launcher.run("--on-failure", "heal", f"--notice=file:{notice}", "sleeping.py", notice)
    assert agent.wait() == 1
    assert "this node was given notice (file: the test says so)" in agent.output
    assert "cannot leave at a step boundary" in agent.output
    assert not os.path.exists(f"{notice}.end")


def test_a_node_that_is_given_notice_before_it_takes_part_ends_at_once(launcher, tmp_path, held_port):
    (tmp_path / "notice").write_text("it goes down soon")
    agent = launcher.run(
        "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}", "--on-failure", "heal",
        f"--notice=file:{tmp_path / 'notice'}", "until.py", tmp_path,
    )  # fmt: skip
    assert agent.wait() == 0, agent.output
    assert "notice was given before this node took part (it goes down soon)" in agent.output
    assert not (tmp_path / "starts").exists()


TRAINS = """
import sys, time, torch, phalanx

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saves = phalanx.elastic.Saves(directory=sys.argv[1] + "/saves")
run = phalanx.elastic.RunOptions(progress=False, leave_signals=("SIGUSR2",))
data = torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
job = phalanx.Job(model, optimizer, data, num_slots=1, slot_batch_size=4, saves=saves, run=run)
for step in job.steps(max_steps=1_000_000):
    for micro in step:
        micro.backward((model(micro.inputs) - micro.targets).pow(2).mean())
    step.commit()
    if step.number == 3:
        open(sys.argv[1] + "/ready", "w").close()
    time.sleep(0.01)
"""


def test_a_job_that_is_given_notice_as_a_whole_saves_and_its_exit_code_names_the_signal(launcher, tmp_path, wait_for):
    """Slurm's way; workers are asked by a signal of the user's choice."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    agent = launcher.run(
        "--on-failure", "heal", "--notice", "slurm:SIGUSR1", "--leave-signal", "SIGUSR2", script, tmp_path
    )
    wait_for((tmp_path / "ready").exists, "the first steps", agent)
    os.kill(agent.pid, signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1, agent.output
    assert "this node was given notice (slurm: the agent got SIGUSR1)" in agent.output
    assert len(list((tmp_path / "saves").glob("step-*"))) == 1, "all were told: the job saved, once"


ASKED = ("--leave-signal", "SIGUSR2")  # what the script waits for


def aws_stops(cloud: Aws) -> None:
    cloud.values["spot/instance-action"] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'


def gcp_stops(cloud: Gcp) -> None:
    cloud.values["preempted"] = "TRUE"


def azure_stops(cloud: Azure) -> None:
    cloud.add("Preempt", "vm_1")


@pytest.mark.parametrize(
    ("name", "cloud", "stop", "reason"),
    [
        ("aws", Aws(), aws_stops, "AWS will terminate this instance"),
        ("gcp", Gcp(), gcp_stops, "Google Cloud preempts this instance"),
        ("azure", Azure(), azure_stops, "Azure"),
    ],
)
def test_a_job_leaves_when_its_cloud_says_so(launcher, tmp_path, wait_for, name, cloud, stop, reason):
    """From the metadata service to the save and the exit code, through a real agent."""
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    with serving(cloud) as service:
        agent = launcher.run("--on-failure", "heal", f"--notice={name}:{service.url}", *ASKED, script, tmp_path)
        wait_for((tmp_path / "ready").exists, "the first steps", agent)
        wait_for(lambda: len(service.asked) > 2, "questions that are answered with no", agent)
        assert not agent.has_ended
        assert "was given notice" not in agent.output
        stop(cloud)
        assert agent.wait() == 0, agent.output
    assert f"this node was given notice ({name}: {reason}" in agent.output, agent.output
    assert len(list((tmp_path / "saves").glob("step-*"))) == 1, "all were told: the job saved, once"


def test_a_job_leaves_when_a_function_of_the_user_says_so(launcher, tmp_path, wait_for):
    """Found beside the script, where the agent was started."""
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "our_scheduler.py").write_text(
        "from pathlib import Path\n"
        f"def says_leave():\n    return 'drained' if Path({str(tmp_path / 'drain')!r}).exists() else None\n"
    )
    agent = launcher.run(
        "--on-failure", "heal", "--notice=call:our_scheduler:says_leave", *ASKED, tmp_path / "trains.py", tmp_path,
        cold=True,
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )  # fmt: skip
    wait_for((tmp_path / "ready").exists, "the first steps", agent)
    (tmp_path / "drain").touch()
    assert agent.wait() == 0, agent.output
    assert "this node was given notice (call:our_scheduler:says_leave: drained)" in agent.output, agent.output
    assert len(list((tmp_path / "saves").glob("step-*"))) == 1


def test_a_pod_that_is_deleted_leaves_and_its_exit_code_is_that_of_the_signal(launcher, tmp_path, wait_for):
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    agent = launcher.run("--on-failure", "heal", "--notice=kubernetes:60", *ASKED, script, tmp_path)
    wait_for((tmp_path / "ready").exists, "the first steps", agent)
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM, agent.output
    assert "this node was given notice (kubernetes: the agent got SIGTERM" in agent.output, agent.output
    assert len(list((tmp_path / "saves").glob("step-*"))) == 1
