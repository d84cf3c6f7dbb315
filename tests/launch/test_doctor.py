"""``phalanx doctor``: its trial of two workers and its check of a rendezvous endpoint, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.comm.stores import TCPStore
from phalanx.launch.cli import _doctor
from phalanx.launch.cli._doctor import check_endpoint, check_two_workers

pytestmark = pytest.mark.timeout(300)  # each imports torch anew, which takes a minute on a machine that is very busy


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **env},
    )


def test_two_workers_really_run() -> None:
    (finding,) = check_two_workers()
    assert finding.level == "ok", finding.text
    assert finding.text.startswith("two workers started and all-reduced in ")


def test_two_workers_that_add_wrongly_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is run, not assumed: one that computes something else fails, and its last words are shown."""
    monkeypatch.setattr(_doctor, "TRIAL", _doctor.TRIAL.replace("== 3.0", "== 4.0"))
    (finding,) = check_two_workers()
    assert finding.level == "bad"
    assert "two workers could not add two numbers" in finding.text
    assert "AssertionError" in finding.text


def test_an_endpoint_that_answers_is_found() -> None:
    with TCPStore.serve() as store:
        endpoint = store.address.removeprefix("tcp://")
        (finding,) = check_endpoint("c10d", endpoint)
        assert finding.level == "ok"
        assert endpoint in finding.text


def test_an_endpoint_in_a_directory_is_found(tmp_path: Path) -> None:
    (finding,) = check_endpoint("file", str(tmp_path))
    assert finding.level == "ok", finding.text


def test_an_endpoint_where_nobody_listens_is_bad(monkeypatch: pytest.MonkeyPatch, held_port: int) -> None:
    monkeypatch.setattr(_doctor, "ENDPOINT_PATIENCE", 0.3)
    endpoint = f"127.0.0.1:{held_port}"
    (finding,) = check_endpoint("c10d", endpoint)
    assert finding.level == "bad"
    assert endpoint in finding.text
    assert "an agent must be running on that machine" in finding.text


def test_an_endpoint_without_a_port_is_bad() -> None:
    (finding,) = check_endpoint("c10d", "node0")
    assert (finding.level, "no port" in finding.text) == ("bad", True)


def test_the_command_checks_the_endpoint_and_sums_up() -> None:
    with TCPStore.serve() as store:
        endpoint = store.address.removeprefix("tcp://")
        good = doctor("--quick", "--rdzv-endpoint", endpoint)
    assert good.returncode == 0, good.stdout + good.stderr
    assert f"ok    the rendezvous endpoint tcp://{endpoint} answers" in good.stdout
    assert "two workers" not in good.stdout
    bad = doctor("--quick", "--json", "--rdzv-endpoint", "nonsense")
    assert bad.returncode == 1
    told = json.loads(bad.stdout)
    assert told["worst"] == "bad"
    assert [finding["level"] for finding in told["findings"] if "nonsense" in finding["text"]] == ["bad"]


def test_a_torch_that_cannot_be_imported_is_bad(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is not there')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = doctor("--quick", PYTHONPATH=path)
    assert found.returncode == 1
    assert "bad   torch cannot be imported: ImportError: libtorch is not there" in found.stdout
    assert "Something is wrong; see bad." in found.stdout
