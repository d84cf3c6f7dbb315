"""LaunchConfig, specs and logs: values that check themselves and are never changed by what takes them."""

from __future__ import annotations

import os
import signal

import pytest

from phalanx.launch import (
    DefaultLogsSpecs,
    LaunchConfig,
    RendezvousParameters,
    Script,
    Std,
    WorkerSpec,
    _get_addr_and_port,
    _get_entrypoint_name,
    record,
)
from phalanx.launch.system._signals import choose_signals
from phalanx.launch.telemetry._logs import to_map
from phalanx.launch.telemetry._pump import Sinks, deliver, finish, tail_of_file, tail_of_sinks
from phalanx.launch.workers._start import WorkerStart

pytestmark = pytest.mark.fast


def test_one_node_needs_no_endpoint_and_nothing_is_mutated():
    config = LaunchConfig(1, 1, 4)
    before = dict(vars(config))
    resolved = config.resolved({})
    assert (resolved.rdzv_backend, resolved.rdzv_endpoint, resolved.shutdown_timeout) == (
        "c10d",
        "localhost:0",
        30,
    )
    assert resolved.rdzv_configs == {"timeout": 900}
    assert resolved.run_id
    assert dict(vars(config)) == before
    assert LaunchConfig(1, 1, 1, rdzv_timeout=5).resolved({}).rdzv_configs["timeout"] == 5
    assert LaunchConfig(1, 1, 1).resolved({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).shutdown_timeout == 7


def test_torchs_fields_are_all_there_in_their_order():
    from dataclasses import fields

    from torch.distributed.launcher.api import LaunchConfig as Theirs

    theirs = [field.name for field in fields(Theirs)]
    assert [field.name for field in fields(LaunchConfig)][: len(theirs)] == theirs


@pytest.mark.parametrize(
    "fields",
    [
        {"min_nodes": 0}, {"min_nodes": 3}, {"nproc_per_node": 0}, {"max_restarts": -1}, {"on_failure": "x"},
        {"shutdown_timeout": -1}, {"signals_to_handle": "SIGNO"}, {"hang_timeout": -1.0}, {"standby": -1},
        {"start_timeout": -1.0},
    ],
)  # fmt: skip
def test_nonsense_is_refused(fields):
    with pytest.raises(ValueError):
        LaunchConfig(**{"min_nodes": 1, "max_nodes": 2, "nproc_per_node": 1, **fields})


def test_torchs_signals_are_handled_by_default_or_as_the_variable_says():
    default = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert choose_signals(None, {}) == default == choose_signals(LaunchConfig(1, 1, 1).signals_to_handle, {})
    environ = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1,SIGTERM"}
    assert choose_signals(None, environ) == (signal.SIGUSR1, signal.SIGTERM)
    assert choose_signals("SIGHUP", environ) == (signal.SIGHUP,)


def test_many_nodes_need_an_endpoint():
    with pytest.raises(ValueError, match="no rdzv_endpoint"):
        LaunchConfig(1, 2, 1).resolved({})


def test_static_address_and_entrypoint_names():
    import sys

    assert _get_addr_and_port(RendezvousParameters("static", "[::1]:80", "r", 1, 1)) == ("::1", 80)
    assert _get_addr_and_port(RendezvousParameters("c10d", "x", "r", 1, 1)) == (None, None)
    for endpoint in ("", "host", "host:x"):
        with pytest.raises(ValueError, match=r"master-port|no endpoint"):
            _get_addr_and_port(RendezvousParameters("static", endpoint, "r", 1, 1))
    assert _get_entrypoint_name(test_many_nodes_need_an_endpoint, []) == "test_many_nodes_need_an_endpoint"
    assert _get_entrypoint_name(sys.executable, ["-u", "-m", "x"]) == "x"
    assert _get_entrypoint_name("/bin/cmd", []) == "/bin/cmd"
    assert _get_entrypoint_name(Script("/a/b.py"), []) == "b.py"
    assert _get_entrypoint_name(None, []) == ""


def test_worker_spec_checks_itself():
    for fields in ({"local_world_size": 0}, {"monitor_interval": 0.0}, {"max_restarts": -1}):
        with pytest.raises(ValueError):
            WorkerSpec(**{"role": "r", "local_world_size": 1, "rdzv_handler": None, "entrypoint": "x", **fields})


@pytest.mark.parametrize("text", ["", "4", "0:4", "a", "0:1,", "0:1;1:2"])
def test_nonsense_streams_are_refused(text):
    with pytest.raises(ValueError, match="expected 0, 1, 2 or 3"):
        Std.from_str(text)


def test_streams_by_rank():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map(Std.from_str("1:3,10:1"), 2) == {0: Std.NONE, 1: Std.ALL}


def envs(count: int, generation: int = 0) -> dict[int, dict[str, str]]:
    return {r: {"TORCHELASTIC_RUN_ID": "my job/1", "PHALANX_GENERATION": str(generation)} for r in range(count)}


def test_log_paths_by_run_generation_and_rank(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path / "new"), redirects=Std.OUT, tee={1: Std.ERR}, local_ranks_filter={1})
    given = envs(2, generation=3)
    dest = specs.reify(given)
    run = os.listdir(tmp_path / "new")
    assert len(run) == 1
    assert run[0].startswith("my_job_1_")
    base = tmp_path / "new" / run[0] / "attempt_3"
    assert dest.stdouts == {0: str(base / "0/stdout.log"), 1: str(base / "1/stdout.log")}
    assert dest.stderrs == {
        0: os.devnull,
        1: str(base / "1/stderr.log"),
    }  # rank 0 is filtered from the console
    assert dest.tee_stderrs == {1: str(base / "1/stderr.log")}
    assert given[0]["TORCHELASTIC_ERROR_FILE"] == str(base / "0/error.json")
    specs.reify(envs(2, generation=4))
    assert os.listdir(tmp_path / "new") == run  # one directory per run


def test_log_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        DefaultLogsSpecs(str(tmp_path / "file"))


def test_devnull_means_no_logs():
    given = envs(1)
    dest = DefaultLogsSpecs(os.devnull, redirects=Std.ALL).reify(given)
    assert dest.stdouts == {0: os.devnull}
    assert given[0]["TORCHELASTIC_ERROR_FILE"] == ""


def test_pump_prefixes_filters_and_remembers(tmp_path):
    read, write = os.pipe()
    log, filtered = tmp_path / "log", tmp_path / "filtered"
    sinks = Sinks(
        console_fd=write, file_fd=os.open(log, os.O_CREAT | os.O_WRONLY), prefix=b"[t1]:",
        filters=(b"apple",), filtered_path=str(filtered),
    )  # fmt: skip
    for data in (b"one\ntw", b"o\nan apple\n10%\r20%\r\n", b"no newline"):
        deliver(sinks, data)
    assert tail_of_sinks(sinks, 3) == ("an apple", "20%", "no newline")
    finish(sinks)
    os.close(write)
    with open(read, "rb") as console:
        assert console.read() == b"[t1]:one\n[t1]:two\n[t1]:an apple\n[t1]:10%\r20%\r\n[t1]:no newline\n"
    assert log.read_bytes() == b"one\ntwo\nan apple\n10%\r20%\r\nno newline"
    assert filtered.read_bytes() == b"[t1]:an apple\n"
    assert tail_of_file(str(log), 2) == ("20%", "no newline")
    assert tail_of_file(str(tmp_path / "absent"), 2) == ()


def test_start_methods_are_checked():
    assert WorkerStart(entrypoint=Script("x.py"), args=(), method="warm").is_warm
    assert not WorkerStart(entrypoint=Script("x.py"), args=(), method="exec").is_warm
    with pytest.raises(ValueError, match="expected one of spawn, fork, forkserver"):
        WorkerStart(entrypoint=print, args=(), method="warm")
    order, fds = WorkerStart(entrypoint="cmd", args=("--rank=${local_rank}",), method="exec").order({}, 3, "")
    assert order["command"] == ["cmd", "--rank=3"]
    assert fds == {}


def test_record_writes_the_first_error_only(tmp_path, monkeypatch):
    from phalanx.launch.failures._error_file import read_error_file

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    @record
    def main(text: str) -> None:
        raise KeyError(text)

    for text in ("first", "second"):
        with pytest.raises(KeyError):
            main(text)
    data = read_error_file(str(path))
    assert data["message"]["message"] == "KeyError: 'first'"
    assert "raise KeyError(text)" in data["message"]["extraInfo"]["py_callstack"]
