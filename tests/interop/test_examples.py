"""Scripts of the kind that torch ships for tensor parallelism, with nothing but their imports changed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "examples"
LAUNCHERS = {
    "phalanx run": [sys.executable, "-m", "phalanx", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
REPLICAS = {"tensor_parallel": 1, "sequence_parallel": 1, "data_and_tensor_parallel": 2}


def with_our_imports(text: str) -> str:
    changed = text.replace("from torch.distributed.device_mesh import", "from phalanx.comm import")
    changed = changed.replace("from torch.distributed.tensor", "from phalanx.tensor")
    lines = [(old, new) for old, new in zip(text.splitlines(), changed.splitlines(), strict=True) if old != new]
    assert lines
    assert all(old.startswith("from torch.distributed.") for old, _ in lines), "only imports change"
    return changed


def losses_on_one_device(name: str) -> list[float]:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        samples = torch.cat([example.batch(step, replica) for replica in range(REPLICAS[name])])
        loss = model(samples).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("tensor_parallel", "phalanx run"),
        ("sequence_parallel", "phalanx run"),
        ("data_and_tensor_parallel", "phalanx run"),
        ("data_and_tensor_parallel", "torchrun"),
        pytest.param("tensor_parallel", "torchrun", marks=pytest.mark.soak),
        pytest.param("sequence_parallel", "torchrun", marks=pytest.mark.soak),
    ],
)
def test_an_example_trains_as_on_one_device(name: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(with_our_imports((HERE / f"{name}.py").read_text()))
    command = [*LAUNCHERS[launcher], "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert found == pytest.approx(losses_on_one_device(name), rel=1e-4)
