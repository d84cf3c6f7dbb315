"""A real Slurm on hosts in a box: one ``slurmctld``, one ``slurmd`` for each host, ``munged`` for all of them.

Needs root and Debian's packages; everything it writes is in one directory, and every process of it ends with the box or
with the ``with`` block.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hosts.box import Box, Host, new_box

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """\
ClusterName=box
SlurmctldHost=host0
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
JobRequeue=1
ReturnToService=2
KillWait=60
InactiveLimit=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    box: Box
    folder: Path

    def on(self, host: Host, *command: str) -> list[str]:
        """The command on a host, where it finds this cluster."""
        return host.inside("env", f"SLURM_CONF={self.folder}/slurm.conf", f"PATH={PATH}", *command)

    def call(self, *command: str, timeout: float = 90.0) -> str:
        done = subprocess.run(self.on(self.box.hosts[0], *command), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: str, *flags: str) -> str:
        """``sbatch``; the number of the job."""
        path = self.folder / f"batch-{secrets.token_hex(3)}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        return self.call("sbatch", "--parsable", *flags, str(path))

    def state(self, job: str) -> str:
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return next(word.partition("=")[2] for word in text.split() if word.startswith("JobState="))

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))


@contextmanager
def new_slurm(num_hosts: int, folder: Path) -> Iterator[Slurm]:
    """A cluster whose nodes are idle; the test is skipped where there can be none."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here (apt-get install slurm-wlm munge)")
    with new_box(num_hosts) as box:
        (folder / "state").mkdir(parents=True)
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=1 State=UNKNOWN" for host in box.hosts)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes=nodes))
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        slurm, started = Slurm(box, folder), []
        first, *_ = box.hosts
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        commands = [(first, ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files])]
        commands.append((first, ["slurmctld", "-D"]))
        commands += [(host, ["slurmd", "-D", "-N", host.name]) for host in box.hosts]
        try:
            for host, command in commands:
                (folder / f"spool-{host.name}").mkdir(exist_ok=True)
                output = (folder / f"{command[0]}-{host.name}.out").open("wb")
                with output:
                    started.append(subprocess.Popen(slurm.on(host, *command), stdout=output, stderr=output))
                if command[0] == "munged":
                    _wait(lambda: (folder / "munge.socket").exists(), f"munged: {folder}")
            _wait(lambda: _idle(slurm) == num_hosts, "all nodes idle", slurm)
            yield slurm
        finally:
            for process in reversed(started):
                process.kill()
                process.wait(60)


def _idle(slurm: Slurm) -> int:
    found = subprocess.run(
        slurm.on(slurm.box.hosts[0], "sinfo", "--noheader", "--Node", "--format=%T"),
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    return found.stdout.split().count("idle")


def _wait(condition, what: str, slurm: Slurm | None = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in 120 s\n{slurm.logs() if slurm else ''}"
        time.sleep(0.2)
