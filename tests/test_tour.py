"""The four walks of ARCHITECTURE.md are what happens: every stop is recorded, in the order in which it is told.

A stop is written as a file and the functions that begin in it. A stop that says *meanwhile* may come at any time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import phalanx
from phalanx.comm import Group, simulate
from phalanx.ddp import DistributedDataParallel
from phalanx.tensor import Shard, distribute_tensor, init_device_mesh
from phalanx.tensor.core._tracing import handlers
from phalanx.tensor.ops._registry import op_name

TOUR = Path(__file__).parent.parent / "ARCHITECTURE.md"
SOURCE = Path(phalanx.__file__).parent
STOP = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)")
Call = tuple[str, str]


class Stop(NamedTuple):
    """A file, a function in it, and whether its turn matters."""

    file: str
    function: str
    in_turn: bool

    @property
    def call(self) -> Call:
        return self.file, self.function.rpartition(".")[2]


def stops(heading: str, column: int = 0) -> list[Stop]:
    """The stops of a walk, read from one column of its table."""
    text = TOUR.read_text()
    section = text.partition(f"### {heading}\n")[2].partition("\n##")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    found = [
        Stop(file, function, "meanwhile" not in row[column])
        for row in rows
        if column < len(row)
        for file, functions in STOP.findall(row[column])
        for function in re.findall(r"`([\w.]+)`", functions)
    ]
    assert found, f"ARCHITECTURE.md has no walk {heading!r}"
    return found


def check_walk(told: list[Stop], recorded: list[Call]) -> None:
    """Every stop was made, and those whose turn matters each after the one before it in the tour."""
    missing = [stop for stop in told if stop.call not in recorded]
    assert not missing, f"told, but not on the way: {missing}"
    rest = iter(recorded)
    early = [stop for stop in told if stop.in_turn and stop.call not in rest]  # ``in`` takes all up to it out of rest
    assert not early, f"not after what is told before them: {early}; recorded: {recorded}"


def record(function: Callable[[], Any]) -> list[Call]:
    """The functions of phalanx that begin in this thread while ``function`` runs, in order."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)):
            found.append((str(Path(path).relative_to(SOURCE)), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def run_recorded(directory: Path, flags: list[str], script: str, **environment: str) -> list[tuple[str, int, str, str]]:
    """What the processes of ``phalanx run`` recorded: (seconds, pid, file, function), in order."""
    (directory / "train.py").write_text(script)
    log = directory / "recorded"
    start = "import sys; from phalanx.__main__ import main; sys.exit(main())"
    path = os.pathsep.join([str(Path(__file__).parent / "recording"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", start, "run", *flags, str(directory / "train.py")],
        check=True,
        timeout=280,
        cwd=directory,
        env={**os.environ, **environment, "PYTHONPATH": path, "RECORD_TO": str(log)},
    )
    rows = [line.split() for line in log.read_text().splitlines()]
    return sorted((seconds, int(pid), file, name) for seconds, pid, file, name in rows)


@pytest.mark.fast
def test_x_plus_y() -> None:
    def on_rank(group: Group) -> tuple[list[Call], list[Call]]:
        mesh = init_device_mesh("cpu", (1,))
        x, y = (distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for _ in range(2))
        x * y  # what is imported or found out once for all
        for func in [func for func in handlers if op_name(func).base == "add"]:  # other tests have added
            del handlers[func]
        op_name.cache_clear()
        return record(lambda: x + y), record(lambda: x + y)

    [(first, remembered)] = simulate(1).run(on_rank)
    check_walk(stops("`x + y` on DTensors, the first time"), first)
    assert [stop.call for stop in stops("`x + y` on DTensors, remembered")] == remembered  # and code without a file


@pytest.mark.fast
def test_one_step_of_ddp() -> None:
    def on_rank(group: Group) -> list[Call]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        for _ in range(6):  # buckets are assigned anew after the first and the third
            model.zero_grad()
            walk = record(lambda: model(torch.ones(4, 8)).sum().backward())
        return walk

    check_walk(stops("One step of DDP"), simulate(2).run(on_rank)[-1])


def test_argv_to_the_first_user_line(tmp_path: Path) -> None:
    recorded = run_recorded(tmp_path, ["--nproc-per-node", "1"], "print('the first line')")
    check_walk(
        stops("From argv to the first line of the user's script"),
        [(file, name) for _, _, file, name in recorded],
    )


KILLED = """
import os, signal, time, torch
from phalanx.elastic import Job, RunOptions

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(400, 3), torch.randn(400, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = Job(model, optimizer, data, num_slots=4, slot_batch_size=4, run=RunOptions(progress=False))
mark = os.environ["RECORD_AFTER"]
for step in job.steps(max_steps=10):
    for micro in step:
        micro.backward(torch.nn.functional.mse_loss(model(micro.inputs), micro.targets))
    if step.number == 5 and job.rank == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getppid(), signal.SIGSTOP)  # the zygote: survivors shall be the first to know, on any machine
        os.kill(os.getpid(), signal.SIGKILL)
    while step.number == 7 and job.generation == 0 and not job.regrouping.coordinator.signals.wish:
        time.sleep(0.01)  # the agent still has its part to do
    if step.commit() and os.path.exists(mark) and job.rank == 0:
        os.kill(os.getppid(), signal.SIGCONT)
        with open("survivor", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


def test_kill_until_the_next_commit(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--on-failure", "heal"]
    recorded = run_recorded(tmp_path, flags, KILLED, RECORD_AFTER=str(tmp_path / "mark"))
    survivor = int((tmp_path / "survivor").read_text().split()[0])
    agents = {pid for _, pid, file, _ in recorded if file in ("launch/agent/_agent.py", "launch/workers/_zygote.py")}
    heading = "`kill -9` until the next commit"
    check_walk(stops(heading, 0), [(file, name) for _, pid, file, name in recorded if pid in agents])
    check_walk(stops(heading, 1), [(file, name) for _, pid, file, name in recorded if pid == survivor])
