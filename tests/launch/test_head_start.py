"""The fast start: nothing heavy before torch, its library loaded beside, no thread left, threads counted right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.launch.cli import _head_start
from phalanx.launch.cli._head_start import begin_to_load, find_library
from phalanx.launch.workers._processes import WorkerProcess, Zygote

pytestmark = pytest.mark.timeout(300)  # some import torch anew, which takes a minute on a machine that is very busy


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280, env={**environ, **env})


def test_everything_that_an_agent_imports_can_do_without_torch():
    code = (
        "import sys, phalanx.launch.cli._run_command, phalanx.launch.cli._from_flags, phalanx.launch.agent._launch, "
        "phalanx.launch.workers._script, "
        "phalanx.launch.rendezvous._backends\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    assert python("-c", code).stdout == "[]\n"


def test_torchs_library_is_there_before_torch_and_no_thread_is_left():
    code = (
        "import os\n"
        "from phalanx.launch.cli._head_start import begin_to_load, find_library\n"
        "path = find_library()\n"
        "wait_loaded = begin_to_load(path)\n"
        "wait_loaded()\n"
        "print(bool(path), os.path.realpath(path) in open('/proc/self/maps').read())\n"
        "import time, torch\n"
        "until = time.monotonic() + 100\n"  # a joined thread leaves the kernel's list a moment later
        "while len(os.listdir('/proc/self/task')) > 1 and time.monotonic() < until: time.sleep(0.01)\n"
        "print(torch.ones(2).sum().item(), find_library() == '', len(os.listdir('/proc/self/task')))\n"
    )
    done = python("-c", code, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    if found[0].split()[0] == "False":
        pytest.skip("this build of torch is left alone")
    assert found == ["True True", "2.0 True 1"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("files", "is_found"),
    [(["libtorch_cpu.so"], True), (["libtorch_cpu.so", "libtorch_cuda.so"], False), ([], False)],
    ids=["processor", "accelerator", "no library"],
)
def test_only_builds_for_the_processor_get_a_head_start(tmp_path, monkeypatch, files, is_found):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    for name in files:
        (tmp_path / "torch" / "lib" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(_head_start.sys, "platform", "linux")
    expected = str(tmp_path / "torch" / "lib" / "libtorch_cpu.so") if is_found else ""
    assert find_library() == expected
    monkeypatch.setattr(_head_start.sys, "platform", "darwin")
    assert find_library() == ""


@pytest.mark.fast
def test_a_library_that_does_not_load_is_left_to_torch(tmp_path):
    (tmp_path / "broken.so").write_text("this is no library")
    begin_to_load(str(tmp_path / "broken.so"))()
    begin_to_load("")()
    assert "phalanx-load-torch" not in {thread.name for thread in threading.enumerate()}


def test_flags_that_contradict_each_other_are_one_line_though_loading_has_begun(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    done = python("-m", "phalanx", "run", "--rdzv-backend", "etcd", "--nnodes", "2", str(script))
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx run: --rdzv-backend etcd needs --rdzv-endpoint")
    assert done.stderr.count("\n") == 1


def test_openmp_is_loaded_with_one_thread_for_each_of_several_workers(tmp_path):
    """It reads its variable when it is loaded, so that must have been set before the head start."""
    script = tmp_path / "threads.py"
    script.write_text("import sys, torch\nsys.stdout.write(f'threads {torch.get_num_threads()}\\n')\n")
    done = python("-m", "phalanx", "run", "--nproc-per-node", "2", "--console=plain", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["threads 1", "threads 1"]


def test_a_zygote_that_has_nothing_to_do_imports_what_replacements_need(tmp_path):
    """A fork right after the start does not wait for it; some later fork has it."""
    script, wanted = tmp_path / "show.py", "phalanx.comm.group._group"
    script.write_text(f"import sys\nopen(sys.argv[1], 'w').write(str({wanted!r} in sys.modules))\n")
    ended: dict[int, threading.Event] = {}
    zygote = Zygote.execute(("torch",))
    zygote.start(lambda process: ended[process.pid].set())
    zygote.wait_ready()

    def has_it(name: str) -> bool:
        process: WorkerProcess = zygote.park()
        ended[process.pid] = threading.Event()
        order = {
            "kind": "script", "target": str(script), "is_module": False, "args": [str(tmp_path / name)], "env": {},
            "cpus": [], "cwd": str(tmp_path), "name": "show", "stacks": "",
        }  # fmt: skip
        process.order(order, {})
        assert ended[process.pid].wait(100)
        return Path(tmp_path / name).read_text() == "True"

    try:
        until = time.monotonic() + 150
        while not has_it("later"):
            assert time.monotonic() < until, f"the zygote never imported {wanted}"
            time.sleep(1.5)
    finally:
        zygote.close()
