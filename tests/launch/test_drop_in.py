"""``--drop-in``: a plain torch script gets ours under torch's names, torch itself keeps its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.conftest import Launcher

from phalanx._drop_in import PARTS, modules_of, parse_parts
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


def test_workers_are_forked_with_ours_imported(launcher: Launcher, tmp_path: Path) -> None:
    """Also those that replace others: a restart is not to wait for imports."""
    script = tmp_path / "looks.py"
    script.write_text(
        "import os, sys\n"
        "names = ('phalanx.ddp', 'phalanx.data.torch_names', 'phalanx.fsdp')\n"
        "print('loaded', os.environ['TORCHELASTIC_RESTART_COUNT'], [name in sys.modules for name in names])\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    agent = launcher.run("--nproc-per-node=1", "--max-restarts=1", "--drop-in=ddp,sampler", script)
    assert agent.wait() == 0, agent.output
    for restart in (0, 1):
        assert f"loaded {restart} [True, True, False]" in agent.output, agent.output
    code = "import os, sys, torch\n" + "".join(f"import {name}\n" for name in modules_of(PARTS))
    code += "assert len(os.listdir('/proc/self/task')) == 1, 'a thread would keep the process from being forked'"
    quiet = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=quiet)
    assert done.returncode == 0, done.stderr


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


IMPORTS = """
from torch.distributed._composable.fsdp import fully_shard as composable
from torch.distributed._composable.fsdp.fully_shard import fully_shard as deep
from torch.distributed._tensor import Shard as old_shard, distribute_tensor as old_distribute
from torch.distributed._tensor.api import DTensor as old_dtensor
from torch.distributed._tensor.device_mesh import init_device_mesh as old_mesh
from torch.distributed._tensor.experimental import local_map as old_local_map
from torch.distributed._tensor.placement_types import Replicate as old_replicate
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.distributed.tensor.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication, local_map, register_sharding
from torch.distributed.tensor.parallel.api import parallelize_module
from torch.distributed.tensor.parallel.loss import loss_parallel
from torch.distributed.tensor.parallel.style import ColwiseParallel
from torch.distributed.tensor.placement_types import Shard, _StridedShard
import torch.distributed.tensor.placement_types as places
dotted = places.Partial
"""


def test_every_module_that_scripts_import_from_gives_ours_which_work_together() -> None:
    """A placement of torch's class is refused by our ``distribute_tensor``: one left out is a script that fails."""
    code = f"""
from phalanx import _drop_in
_drop_in.install(_drop_in.parse_parts("tensor,fsdp"), lambda line: None)
before = set(globals())
{IMPORTS}
found = {{name: value for name, value in globals().items() if name not in before | {{"before", "places"}}}}
assert len(found) == 20, sorted(found)
for name, value in found.items():
    assert value.__module__.startswith("phalanx."), (name, value.__module__)
import torch
from phalanx.comm import simulate

def program(group):
    mesh = old_mesh("cpu", (2,))
    tensor = old_distribute(torch.arange(4.0), mesh, [Shard(0)])
    assert isinstance(tensor, old_dtensor) and tensor.placements == (old_shard(0),)
    with CommDebugMode() as mode:
        full = tensor.redistribute(mesh, [old_replicate()]).to_local()
    return full.tolist(), mode.get_total_counts()

assert simulate(2).run(program) == [([0.0, 1.0, 2.0, 3.0], 1)] * 2
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


def test_a_mistake_of_the_script_gets_our_diagnosis(launcher: Launcher) -> None:
    agent = launcher.run("--nproc-per-node=2", "--drop-in=ddp", "mismatched_models.py")
    assert agent.wait() != 0
    assert "ReplicaMismatch" in agent.output, agent.output
    assert re.search(r"rank [01]: the ranks' models differ: .*1\.weight.*build it in the same way", agent.output)


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
