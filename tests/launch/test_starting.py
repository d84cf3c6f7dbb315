"""How workers are started: as ``__main__`` with their own argv, path and streams, warm or fresh."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from phalanx.launch import create_healthcheck_server
from phalanx.launch.cli import _doctor
from phalanx.launch.cli._doctor import check_names, check_ports, check_shared_memory, main

pytestmark = pytest.mark.timeout(300)  # some import torch anew, which takes a minute on a machine that is very busy

HERE = Path(__file__).parent / "workers"


def facts(base: Path, rank: int) -> dict:
    return json.loads(Path(f"{base}.{rank}").read_text())


def test_warm_workers_run_the_script_as_main(launcher, tmp_path):
    base, logs = tmp_path / "facts", tmp_path / "logs"
    agent = launcher.run(
        "--nproc-per-node", 2, "--preload", "colorsys,asks_for_temporary", "--log-dir", logs, "-r", "0:1", "-t", "1:3",
        "--role", "show", "--duplicate-stdout-filters", "out", "showing.py", base, "--flag", "two words", cold=True,
        PYTHONPATH=str(HERE),
    )  # fmt: skip
    assert agent.wait() == 0, agent.output
    for rank in range(2):
        seen = facts(base, rank)
        assert seen["argv"] == [str(HERE / "showing.py"), str(base), "--flag", "two words"]
        assert (seen["path0"], seen["name"], seen["file"]) == (
            str(HERE),
            "__main__",
            str(HERE / "showing.py"),
        )
        assert {"torch", "colorsys"} <= set(seen["modules"])
        assert seen["os_threads"] == 1  # forked before any thread existed
        assert "OPENBLAS_NUM_THREADS" not in seen["environ"]
        assert seen["temporary"] == str(tmp_path)  # as the script has set it, whoever asked for another before
    if "numpy" in facts(base, 0)["modules"]:  # forks must not share random state
        drawn = zip(facts(base, 0)["random"], facts(base, 1)["random"], strict=True)
        assert all(one != other for one, other in drawn)
    # Rank 0's stdout only in its file, rank 1's streams in files and, with a prefix, on the console.
    (run,) = logs.iterdir()
    assert (run / "attempt_0/0/stdout.log").read_text() == "out 0\n"
    assert (run / "attempt_0/1/stderr.log").read_text() == "err 1\n"
    assert (run / "attempt_0/filtered_stdout.log").read_text() == "[show1]:out 1\n"
    assert "out 0" not in agent.output
    assert "err 0\n" in agent.output
    assert "[show1]:out 1\n" in agent.output
    assert "[show1]:err 1\n" in agent.output
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds == [
        "generation_formed",
        "worker_started",
        "worker_started",
        "worker_exited",
        "worker_exited",
        "shut_down",
    ]


@pytest.mark.parametrize("method", ["warm", "exec"])
def test_modules_run_as_with_python_m(launcher, tmp_path, method, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text((HERE / "showing.py").read_text())
    monkeypatch.chdir(tmp_path)
    agent = launcher.run("--start-method", method, "-m", "package.train", tmp_path / "facts")
    assert agent.wait() == 0, agent.output
    seen = facts(tmp_path / "facts", 0)
    assert seen["name"] == "__main__"
    assert seen["path0"] == str(tmp_path)
    assert seen["argv"][0] == str(package / "train.py")
    assert ("torch" in seen["modules"]) == (method == "warm")


def test_fresh_interpreters_report_errors_without_record(launcher, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("def deep():\n    raise KeyError('who')\n\ndeep()\n")
    agent = launcher.run("--start-method", "exec", script)
    assert agent.wait() == 1
    report = agent.output.partition("Root cause")[2]
    assert "KeyError: 'who'" in report
    assert "in deep" in report
    assert "phalanx" not in report.partition("traceback :")[2].partition("=====")[0]  # no frames of ours


def test_commands_are_executed_and_their_last_words_reported(launcher, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\necho rank $RANK of $WORLD_SIZE\necho it is broken >&2\nexit 9\n")
    script.chmod(0o755)
    agent = launcher.run("--no-python", script)
    assert agent.wait() == 1
    assert "rank 0 of 1" in agent.output
    report = agent.output.partition("Root cause")[2]
    assert "exitcode  : 9" in report
    assert "it is broken" in report


def test_preload_that_cannot_be_imported_is_one_line(launcher, tmp_path):
    agent = launcher.run("--preload", "no_such_thing", "showing.py", tmp_path / "facts")
    assert agent.wait() == 1
    assert "phalanx run: --preload no_such_thing: ModuleNotFoundError" in agent.output
    launcher.wait_until_empty()


@pytest.mark.fast
def test_health_check_tells_the_living_from_the_dead():
    import time

    alive = [time.time()]
    server = create_healthcheck_server(lambda: alive[0], 0, 3600)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/"
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(url, timeout=90) as answer:
            assert answer.status == 200
        alive[0] -= 7200
        with pytest.raises(urllib.error.HTTPError) as caught:
            no_proxy.open(url, timeout=90)
        assert caught.value.code == 503
        caught.value.close()
    finally:
        server.stop()


def test_doctor_finds_a_healthy_machine_and_a_dead_endpoint(capsys, monkeypatch):
    monkeypatch.setattr(_doctor, "ENDPOINT_PATIENCE", 0.2)
    assert {finding.level for check in (check_ports, check_names, check_shared_memory) for finding in check()} <= {
        "ok",
        "warn",
    }
    code = main(["--quick", "--rdzv-endpoint", "127.0.0.1:1"])
    printed = capsys.readouterr().out
    assert code == 1
    assert "bad   the rendezvous endpoint 127.0.0.1:1 cannot be reached" in printed
    assert "ok    torch" in printed
    assert os.path.isdir("/dev/shm") is ("/dev/shm" in printed)


def test_the_example_trains(launcher):
    example = Path(__file__).parents[2] / "examples" / "launch" / "train.py"
    agent = launcher.run("--nproc-per-node", 2, example, "--steps", 30)
    assert agent.wait() == 0, agent.output
    assert "2 workers, 0 restarts: y = " in agent.output
