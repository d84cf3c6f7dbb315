"""The examples are what users copy: they parse, and every ``phalanx run`` line in them is one that we accept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from phalanx.launch.cli._flags import parse
from phalanx.launch.cli._from_flags import config_from_args
from phalanx.launch.config._config import LaunchConfig
from phalanx.world import port_of

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).parents[2] / "examples"
SLURM = {
    "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[0-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "0",
}  # fmt: skip
ENVIRON = {"HOST": "node0", "ETCD": "e0:2379,e1:2379", **SLURM}
SHELL = ("launch/single_node.sh", "launch/multi_node_c10d.sh", "launch/multi_node_etcd.sh", "slurm/train.sbatch")


@pytest.mark.parametrize("name", SHELL)
def test_shell_examples_parse(name: str) -> None:
    shell = "bash" if name.endswith(".sbatch") else "sh"
    done = subprocess.run([shell, "-n", EXAMPLES / name], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def words_of(name: str, tmp_path: Path) -> list[str]:
    """What ``phalanx`` is called with when the script is run, on a machine that has srun."""
    for command, body in (
        ("phalanx", 'printf "%s\\n" "$@" > "$CALLED_WITH"'),
        ("srun", 'shift; "$@"'),
    ):
        (tmp_path / command).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / command).chmod(0o755)
    called = tmp_path / "words"
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environ = {"PATH": path, "CALLED_WITH": str(called), **ENVIRON}
    subprocess.run(["bash", EXAMPLES / name], env=environ, timeout=60, check=True)
    return called.read_text().splitlines()


def config_of(words: list[str]) -> LaunchConfig:
    assert words[0] == "run"
    args = parse(words[1:], {})
    assert Path(args.training_script).name == "train.py"
    assert args.training_script_args[0].startswith("--steps")
    return config_from_args(args, 2).resolved({})


def test_one_node(tmp_path: Path) -> None:
    config = config_of(words_of("launch/single_node.sh", tmp_path))
    assert (config.max_nodes, config.rdzv_endpoint, config.max_restarts) == (1, "localhost:0", 3)


@pytest.mark.parametrize(
    ("name", "backend", "endpoint", "job"),
    [
        ("launch/multi_node_c10d.sh", "c10d", "node0:29400", "demo"),
        ("launch/multi_node_etcd.sh", "etcd", "e0:2379,e1:2379", "demo"),
        ("slurm/train.sbatch", "c10d", f"node0:{port_of('slurm-17.0.0')}", "slurm-17.0.0"),
    ],
)
def test_many_nodes_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str, endpoint: str, job: str
) -> None:
    for variable, value in SLURM.items():
        monkeypatch.setenv(variable, value)
    config = config_of(words_of(name, tmp_path))
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == (backend, endpoint, job)
    assert config.min_nodes < config.max_nodes == 4
    assert config.max_restarts == 3
