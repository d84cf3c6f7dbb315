"""Real processes over gloo: results, gradients, local parts and training equal those of torch's DTensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 4])
def test_parity_with_torch_over_gloo(size: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "gloo_worker.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=200)[0])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)[-4000:]
