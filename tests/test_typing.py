"""Names that are loaded on first use are known to type checkers, and a misspelt one is an error for them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

SOURCE = Path(__file__).parent.parent / "src"
LAZY = ["phalanx", "phalanx.comm", "phalanx.comm.stores", "phalanx.launch"]


def init_file(package: str) -> Path:
    return SOURCE / package.replace(".", "/") / "__init__.py"


@pytest.mark.parametrize("package", LAZY)
def test_what_checkers_are_told_is_what_is_loaded(package):
    module = importlib.import_module(package)
    told = {
        alias.asname
        for node in ast.parse(init_file(package).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for alias in statement.names
    }
    offered = {name for name in module._HOMES if not name.startswith("_")}
    assert told == offered | set(getattr(module, "_PACKAGES", ()))


def test_a_misspelt_name_is_an_error_for_mypy(tmp_path):
    """Only these files are looked at, since all of torch would take a minute."""
    snippet = tmp_path / "snippet.py"
    right = ["phalanx.Job", "phalanx.init", "phalanx.elastic", "phalanx.comm.Group", "phalanx.launch.LaunchConfig",
             "phalanx.comm.stores.connect"]  # fmt: skip
    wrong = ["phalanx.Jobb", "phalanx.comm.Grup", "phalanx.launch.LaunchConfg", "phalanx.comm.stores.conect"]
    snippet.write_text("\n".join([*(f"import {package}" for package in LAZY), *right, *wrong]))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=skip",
        "--config-file=",
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    done = subprocess.run(
        [*command, str(snippet), *(str(init_file(package)) for package in LAZY)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=SOURCE,
    )
    errors = [line for line in done.stdout.splitlines() if "snippet.py" in line]
    assert len(errors) == len(wrong), done.stdout + done.stderr
    for name, line in zip(wrong, errors, strict=True):
        assert f'Module has no attribute "{name.rpartition(".")[2]}"' in line
