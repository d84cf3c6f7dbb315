"""``--drop-in``: a plain torch script gets ours under torch's names, torch itself keeps its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import Launcher

from phalanx._drop_in import PARTS, parse_parts
from phalanx.launch.cli._flags import FLAGS, UsageError, parse, with_values

pytestmark = pytest.mark.timeout(300)


def said(text: str) -> dict[str, str]:
    (line,) = re.findall(r"first=.*", text)
    first, total, kinds = line.split(" ", 2)
    return {"first": first, "sum": total, "kinds": kinds}


def test_a_script_runs_unchanged_dies_and_resumes_from_its_own_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "ours", "dies")]
    for folder in folders:
        folder.mkdir()
    plain = launcher.run("--nproc-per-node=2", "plain_torch.py", folders[0])
    ours = launcher.run("--nproc-per-node=2", "--drop-in", "plain_torch.py", folders[1])
    assert plain.wait() == 0, plain.output
    assert ours.wait() == 0, ours.output
    dies = launcher.run("--nproc-per-node=2", "--max-restarts=1", "--drop-in", "plain_torch.py", folders[2], "die")
    assert dies.wait() == 0, dies.output
    answers = [said(agent.output) for agent in (plain, ours, dies)]
    assert answers[0]["sum"] == answers[1]["sum"] == answers[2]["sum"]
    assert [answer["first"] for answer in answers] == ["first=0", "first=0", "first=2"]
    assert "phalanx" not in answers[0]["kinds"]
    for module in ("phalanx.ddp", "phalanx.data", "phalanx.fsdp", "phalanx.tensor"):
        assert module in answers[1]["kinds"]
    log = ours.output
    assert log.count("torch.nn.parallel.DistributedDataParallel is phalanx.ddp.DistributedDataParallel") == 1
    assert "a failure restarts all workers, and the script resumes from its own checkpoint" in log


def test_torch_keeps_its_own_names_and_every_name_is_there() -> None:
    code = """
import sys
from phalanx import _drop_in
told = []
_drop_in.install(_drop_in.parse_parts("all"), told.append)
assert "torch" not in sys.modules
import torch.distributed.checkpoint.state_dict as state_dict
import torch.distributed.fsdp, torch.distributed.tensor.parallel
assert state_dict.DTensor.__module__.startswith("torch."), state_dict.DTensor
assert told == [], told
from importlib import import_module
for part in _drop_in.PARTS.values():
    for name, (ours, names) in part.items():
        for each in names:
            assert getattr(import_module(name), each) is getattr(import_module(ours), each), (name, each)
            assert each in dir(import_module(name))
from torch.nn.parallel import *
assert DistributedDataParallel.__module__.startswith("phalanx."), DistributedDataParallel
count = len(told)
torch.nn.parallel.DistributedDataParallel
assert len(told) == count == len(set(told))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_parts_that_are_not_asked_for_stay_torchs() -> None:
    code = """
from phalanx import _drop_in
told = []
_drop_in.install(_drop_in.parse_parts("ddp,sampler"), told.append)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
kinds = [DistributedDataParallel, DistributedSampler, DTensor, fully_shard]
assert [kind.__module__.partition(".")[0] for kind in kinds] == ["phalanx", "phalanx", "torch", "torch"], kinds
assert len(told) == 2, told
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.fast
def test_which_parts_are_meant() -> None:
    assert parse_parts("all") == tuple(PARTS)
    assert parse(["--drop-in", "a.py"], {}).drop_in == tuple(PARTS)
    assert parse(["--drop-in", "ddp,fsdp", "a.py"], {}).drop_in == ("ddp", "fsdp")
    assert parse(["a.py", "--drop-in"], {}).training_script_args == ["--drop-in"]
    words = ["--nnodes", "1", "--nproc-per=2", "--drop_in", "-m", "tool"]
    assert with_values(words, FLAGS) == ["--nnodes", "1", "--nproc-per=2", "--drop-in=all", "-m", "tool"]
    with pytest.raises(UsageError, match="drop-in"):
        parse(["--drop-in=dpp", "a.py"], {})
