"""An export holds one tensor at a time: it succeeds in a process that may not have memory for more than a few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx import checkpoint, shard
from phalanx.tensor import Shard, distribute_tensor

COUNT, ROWS = 64, 512  # tensors of 1 MB each
ROOM = 12 << 20

CODE = """
import resource, sys
import torch
from phalanx import checkpoint
small, large, out, format, room = sys.argv[1:]
checkpoint.export(small, out + "-small", format=format)  # all is imported, and every thread has its stack
(used,) = (int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(room), resource.RLIM_INFINITY))
try:
    torch.empty(2 * int(room), dtype=torch.uint8)
except RuntimeError:
    checkpoint.export(large, out, format=format)
else:
    sys.exit("the limit does not bind")
"""


def save(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Write tensors that two ranks hold halves of."""
    torch.manual_seed(0)
    whole = {f"layers.{i}.weight": torch.rand(ROWS, 512) for i in range(count)}

    def run(_: object) -> None:
        mesh = phalanx.init_device_mesh("cpu", (2,))
        shard.save({name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}, folder)

    phalanx.simulate(2).run(run)
    return whole


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how much memory a process has")
@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_an_export_needs_memory_for_a_few_of_many_tensors(format: str, tmp_path: Path) -> None:
    save(tmp_path / "small", 1)
    whole = save(tmp_path / "large", COUNT)
    out = tmp_path / "out"
    command = [sys.executable, "-c", CODE, *map(str, (tmp_path / "small", tmp_path / "large", out, format, ROOM))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    state = {name: torch.zeros_like(value) for name, value in whole.items()}
    checkpoint.load(out, state)
    assert all(torch.equal(state[name], value) for name, value in whole.items())
