"""torch.compile in real workers: tensor parallel with dropout, DDP, fully_shard, as ``compiled_script.py`` has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compiled_script.py"
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)
WAYS = [
    ("aot_eager", ""),
    pytest.param("aot_eager", "--gloo", marks=pytest.mark.soak),
    pytest.param("inductor", "", marks=[pytest.mark.soak, needs_compiler]),
    pytest.param("inductor", "--gloo", marks=[pytest.mark.soak, needs_compiler]),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "transport"), WAYS)
def test_two_workers_compile_what_they_run_in_eager(backend: str, transport: str, tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node=2", "--preload=torch._dynamo"]
    told = [str(SCRIPT), str(tmp_path), backend, *([transport] if transport else [])]
    environment = {**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    ran = subprocess.run(
        [*command, *told], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    used = {path.name: path.read_text() for path in tmp_path.glob("done-*")}
    assert sorted(used) == ["done-0", "done-1"], "both ranks came to the end"
    assert (set(used.values()) == {"gloo"}) == bool(transport), used
