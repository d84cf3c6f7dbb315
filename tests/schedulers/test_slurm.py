"""Jobs under a real Slurm of three nodes: what ``srun`` says is all that ``phalanx run`` needs to know.

In ``make soak``: it needs root and Debian's ``slurm-wlm`` and ``munge``, and is skipped elsewhere, with the reason.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.cluster import PRELOAD, Cluster
from tests.hosts.jobs import SCRIPT, undisturbed
from tests.schedulers.slurm_cluster import Slurm, new_slurm

from phalanx.launch.rendezvous._hostlist import expand_hosts

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

NUM_STEPS = 30
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class SlurmJob(Cluster):
    """A job that ``sbatch`` started, looked at through what its workers write."""

    def __init__(self, slurm: Slurm, directory: Path, *, hold: int, flags: str = "", script_flags: str = "") -> None:
        self.slurm, self.directory = slurm, directory
        directory.mkdir(parents=True)
        self.hold(hold)
        self.process = self  # what wait_until asks whether it has ended
        words = [sys.executable, "-m", "phalanx", "run", "--rdzv-backend", "slurm", "--nnodes", "2:3", "--on-failure",
                 "heal", f"--preload={PRELOAD}", "--rdzv-conf", "last_call_timeout=100", *flags.split(),
                 str(SCRIPT), str(directory), str(NUM_STEPS), "0.01", "--save=2", *script_flags.split()]  # fmt: skip
        self.job = slurm.submit(
            f"exec srun --kill-on-bad-exit=0 {shlex.join(words)}",
            "--nodes=3", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={directory}/output",
        )  # fmt: skip

    def text(self) -> str:
        path = self.directory / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def poll(self) -> str | None:
        state = self.slurm.state(self.job)
        return state if state in ENDED else None

    def wait_requeued(self) -> None:
        deadline = time.monotonic() + 120
        while self.poll() is not None:
            assert time.monotonic() < deadline, f"job {self.job} was not requeued\n{self.text()[-4000:]}"
            time.sleep(0.1)

    def wait_ended(self) -> str:
        deadline = time.monotonic() + 300
        while (state := self.poll()) is None:
            assert time.monotonic() < deadline, f"job {self.job} did not end\n{self.text()[-4000:]}"
            time.sleep(0.5)
        return state


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with new_slurm(3, tmp_path_factory.mktemp("slurm") / "cluster") as made:
        yield made


def test_hosts_are_listed_as_slurms_own_tool_lists_them(slurm):
    for text in ("gpu[01-03,7],login0", "rack[1-2]n[0-1]", "a[008-011]", "x", "n[1,3,5]"):
        assert expand_hosts(text) == slurm.call("scontrol", "show", "hostnames", text).split(), text


def test_srun_is_all_that_agents_need_to_find_one_another(slurm, tmp_path):
    script = Path(__file__).parent / "sum_of_ranks.py"
    words = [sys.executable, "-m", "phalanx", "run", "--rdzv-backend", "auto", str(script), str(tmp_path)]
    slurm.call("srun", "--nodes=3", "--ntasks-per-node=1", *words, timeout=300)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == ["3 0 3"] * 3


def test_a_lost_agent_and_a_requeue_cost_no_step(slurm, tmp_path):
    expected = undisturbed(tmp_path / "quiet", NUM_STEPS)
    job = SlurmJob(slurm, tmp_path / "job", hold=5)
    job.wait_until(lambda: len(job.newest_round()) == 3, "a round of 3 workers", timeout=400)
    job.wait_step(5)
    slurm.box.hosts[1].call("sh", "-c", "kill -9 $(pgrep -o -f 'phalanx run')")
    job.hold(8)
    job.wait_step(8)
    job.wait_workers(2)
    before = set(job.newest_round())
    slurm.call("scontrol", "requeue", job.job)
    job.wait_until(lambda: not before & set(job.events("regrouped")[-1]["workers"]), "another run", timeout=400)
    job.release()
    assert job.wait_ended() == "COMPLETED", job.text()[-4000:]
    assert job.digests() == {expected}


def test_the_signal_before_the_time_limit_is_a_polite_leave(slurm, tmp_path):
    """``--signal=USR1@SECONDS`` sends what ``scancel --signal=USR1`` sends, to the same processes. The job is not done,
    and its exit code says so; requeued, it goes on from its save."""
    expected = undisturbed(tmp_path / "quiet", NUM_STEPS)
    job = SlurmJob(slurm, tmp_path / "job", hold=6, flags="--notice slurm")
    job.wait_until(lambda: len(job.newest_round()) == 3, "a round of 3 workers", timeout=400)
    job.wait_step(6)
    slurm.call("scancel", "--signal=USR1", job.job)
    assert job.wait_ended() == "FAILED", job.text()[-4000:]
    assert job.text().count("its workers have left because of SIGUSR1") == 3
    newest = max(int(path.name.removeprefix("step-")) for path in (job.directory / "saves").glob("step-*"))
    assert newest >= 6
    assert "Traceback" not in job.text()
    slurm.call("scontrol", "requeue", job.job)
    job.wait_requeued()
    job.release()
    assert job.wait_ended() == "COMPLETED", job.text()[-4000:]
    assert job.digests() == {expected}
