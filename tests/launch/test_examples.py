"""The examples are what users copy: they parse, and every ``phalanx run`` line in them is one that we accept."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from phalanx.launch.cli._flags import parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.config._config import LaunchConfig

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
ENVIRON = {"HOST": "node0", "ETCD": "e0:2379,e1:2379", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "17"}
SHELL = ("single_node.sh", "multi_node_c10d.sh", "multi_node_etcd.sh", "slurm.sbatch")


@pytest.mark.parametrize("name", SHELL)
def test_shell_examples_parse(name: str) -> None:
    shell = "bash" if name.endswith(".sbatch") else "sh"
    done = subprocess.run([shell, "-n", EXAMPLES / name], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def words_of(name: str, tmp_path: Path) -> list[str]:
    """What ``phalanx`` is called with when the script is run, on a machine that has Slurm."""
    for command, body in (
        ("phalanx", 'printf "%s\\n" "$@" > "$CALLED_WITH"'),
        ("scontrol", "printf 'node0\\nnode1\\n'"),
        ("srun", 'shift; "$@"'),
    ):
        (tmp_path / command).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / command).chmod(0o755)
    called = tmp_path / "words"
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environ = {"PATH": path, "CALLED_WITH": str(called), "SLURM_JOB_NODELIST": "node[0-3]", **ENVIRON}
    subprocess.run(["bash", EXAMPLES / name], env=environ, timeout=60, check=True)
    return called.read_text().splitlines()


def manifest_words() -> list[str]:
    """The container's command, read line by line: the only list of plain words in the manifest."""
    lines = (EXAMPLES / "kubernetes.yaml").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip() == "command:") + 1
    indent = re.match(r" *", lines[start])
    assert indent is not None
    words = []
    for line in lines[start:]:
        if not line.startswith(f"{indent.group()}- "):
            break
        words += shlex.split(line.strip().removeprefix("- "))
    return words[1:]


def config_of(words: list[str]) -> LaunchConfig:
    assert words[0] == "run"
    args = parse(words[1:], {})
    assert Path(args.training_script).name == "train.py"
    assert args.training_script_args[0].startswith("--steps")
    return config_from_args(args, 2).resolved({})


def test_one_node(tmp_path: Path) -> None:
    config = config_of(words_of("single_node.sh", tmp_path))
    assert (config.max_nodes, config.rdzv_endpoint, config.max_restarts) == (1, "localhost:0", 3)


@pytest.mark.parametrize(
    ("name", "backend", "endpoint", "job"),
    [
        ("multi_node_c10d.sh", "c10d", "node0:29400", "demo"),
        ("multi_node_etcd.sh", "etcd", "e0:2379,e1:2379", "demo"),
        ("slurm.sbatch", "c10d", "node0:29400", "17"),
        ("kubernetes.yaml", "c10d", "phalanx-0.phalanx:29400", "phalanx"),
    ],
)
def test_many_nodes_with_the_same_command(tmp_path: Path, name: str, backend: str, endpoint: str, job: str) -> None:
    words = manifest_words() if name.endswith(".yaml") else words_of(name, tmp_path)
    config = config_of(words)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == (backend, endpoint, job)
    assert config.min_nodes < config.max_nodes == 4
    assert config.max_restarts == 3


def test_the_manifest_holds_together() -> None:
    """No YAML parser is among our dependencies: what must agree is compared in the text."""
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    assert "\t" not in text
    assert re.findall(r"^kind: (\w+)$", text, re.M) == ["Service", "Job"]
    assert text.count("\n---\n") == 1
    assert set(re.findall(r"job-name: (\w+)", text)) == {"phalanx"}  # the service finds the job's pods
    assert re.search(r"subdomain: phalanx$", text, re.M)
    port = re.search(r'TORCHELASTIC_HEALTH_CHECK_PORT, value: "(\d+)"', text)
    assert port is not None
    assert f"http://127.0.0.1:{port.group(1)}'" in text
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    patience = re.search(r"--shutdown-timeout=(\d+)", text)
    assert grace is not None
    assert patience is not None
    assert int(grace.group(1)) > int(patience.group(1))
