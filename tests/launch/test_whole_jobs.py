"""What a job leaves behind for its users: variables in every generation, events, metrics, logs, the final report."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.launch.conftest import complete_rows

from phalanx.launch import (
    ChildFailedError,
    DefaultLogsSpecs,
    HealthCheckServer,
    LaunchConfig,
    ProcessFailure,
    Std,
    elastic_launch,
)
from phalanx.launch.agent._observer import Observer
from phalanx.launch.metrics import MetricData, MetricHandler, Metrics

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import functions

pytestmark = pytest.mark.timeout(400)

TORCHRUNS_VARIABLES = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip

SHOWING_VARIABLES = """
import json, os, signal, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
seen = {**os.environ, "sum": x.item()}
with open(os.path.join(sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def kinds_of(logs: Path) -> list[str]:
    (run,) = logs.iterdir()
    return [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]


def test_variables_are_set_and_right_in_every_generation(launcher, tmp_path):
    script, logs = tmp_path / "variables.py", tmp_path / "logs"
    script.write_text(SHOWING_VARIABLES)
    agent = launcher.run(
        "--nproc-per-node", 2, "--max-restarts", 1, "--role", "r", "--log-dir", logs, script, tmp_path,
    )  # fmt: skip
    assert agent.wait() == 0, agent.output
    for generation in range(2):
        for rank in range(2):
            seen = json.loads((tmp_path / f"{generation}.{rank}").read_text())
            assert seen.keys() >= TORCHRUNS_VARIABLES
            assert seen["sum"] == 2.0
            assert {seen[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
            sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
            assert {seen[name] for name in sizes} == {"2"}
            assert (seen["GROUP_RANK"], seen["GROUP_WORLD_SIZE"], seen["ROLE_NAME"]) == ("0", "1", "r")
            assert (seen["TORCHELASTIC_RESTART_COUNT"], seen["TORCHELASTIC_MAX_RESTARTS"]) == (
                str(generation),
                "1",
            )
            assert seen["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_{generation}/{rank}/error.json")
    kinds = kinds_of(logs)
    assert kinds.count("generation_formed") == 2
    assert kinds.count("worker_started") == kinds.count("worker_exited") == 4
    assert kinds.count("job_restarted") == kinds.count("generation_ended") == 1
    assert kinds[-1] == "shut_down"


def test_events_of_a_job_that_heals_after_a_hang(launcher, tmp_path):
    out, logs = tmp_path / "out", tmp_path / "logs"
    out.mkdir()
    agent = launcher.run(
        "--nproc-per-node", 2, "--on-failure", "heal", "--hang-timeout", 15, "--log-dir", logs, "healing.py", out, 8,
        "1:3:hang",
    )  # fmt: skip
    assert agent.wait() == 0, agent.output
    kinds = kinds_of(logs)
    assert kinds.count("worker_hung") == kinds.count("worker_replaced") == 1, kinds
    assert kinds.count("worker_started") == kinds.count("worker_exited") == 3
    assert kinds.count("generation_ended") == kinds.count("job_restarted") == 1
    assert kinds.count("generation_formed") == 2


@pytest.mark.parametrize("how", ["signal", "failure"])
def test_workers_that_are_stopped_at_the_end_have_exit_events_too(launcher, tmp_path, wait_for, how):
    logs = tmp_path / "logs"
    words = ("--nproc-per-node", 2, "--log-dir", logs)
    if how == "signal":
        agent = launcher.run(*words, "signals.py", tmp_path, "polite")
        wait_for(lambda: len(complete_rows(tmp_path / "ready")) == 2, "two workers", agent)
        os.kill(agent.pid, signal.SIGTERM)
        assert agent.wait() == 128 + signal.SIGTERM
    else:
        script = tmp_path / "one_fails.py"
        script.write_text("import os, time\nif os.environ['RANK'] == '0':\n    raise SystemExit(3)\ntime.sleep(600)\n")
        assert launcher.run(*words, script).wait() == 1
    kinds = kinds_of(logs)
    assert kinds.count("worker_started") == kinds.count("worker_exited") == 2, kinds
    assert kinds.count("shut_down") == 1


def test_hang_on_one_node_writes_the_stacks_of_all_nodes(launcher, tmp_path, held_port):
    out = tmp_path / "out"
    out.mkdir()
    agents = [
        launcher.run(
            "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{held_port}", "--rdzv-id", "hang",
            "--rdzv-conf", "last_call_timeout=1,lease=40", "--on-failure", "heal", "--hang-timeout", 15,
            "--log-dir", tmp_path / f"logs{n}", "healing.py", out, 8, "1:3:hang",
        )
        for n in range(2)
    ]  # fmt: skip
    assert [agent.wait() for agent in agents] == [0, 0], [agent.output for agent in agents]
    for n in range(2):
        (dump,) = (tmp_path / f"logs{n}").rglob("attempt_0/0/stacks.log")
        assert "healing.py" in dump.read_text(), agents[n].output
    assert sum("in fault" in path.read_text() for path in tmp_path.rglob("stacks.log")) == 1


def test_roles_are_counted_by_role(launcher, tmp_path, held_port):
    """Two nodes of one job with different roles and sizes, as torchrun allows."""
    words = (
        "--nnodes",
        2,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{held_port}",
        "--rdzv-id",
        "roles",
    )
    agents = [
        launcher.run(*words, "--nproc-per-node", size, "--role", role, "showing.py", tmp_path / "facts")
        for role, size in (("reader", 2), ("trainer", 1))
    ]
    assert [agent.wait() for agent in agents] == [0, 0], [agent.output for agent in agents]
    seen = [json.loads((tmp_path / f"facts.{rank}").read_text())["environ"] for rank in range(3)]
    found = sorted((env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) for env in seen)
    assert found == [("reader", "0", "2"), ("reader", "1", "2"), ("trainer", "0", "1")]


def test_report_with_record_in_files_with_prefix_and_last_words(launcher, tmp_path):
    """``@record`` or not, console or file: the report has the traceback and the last lines of stderr."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\nfrom phalanx.launch import record\n\n@record\ndef main():\n"
        "    print('last words', file=sys.stderr)\n    raise KeyError('recorded')\n\nmain()\n"
    )
    logs = tmp_path / "logs"
    agent = launcher.run(
        "--log-dir", logs, "-t", "3", "--role", "r", script,
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${rank} ${local_rank} ${host}> ",
    )  # fmt: skip
    assert agent.wait() == 1
    host = socket.gethostname()
    assert f"<r 0 0 {host}> last words\n" in agent.output
    report = agent.output.partition("Root cause (the earliest failure):")[2]
    assert re.search(rf"time +: \d{{4}}-\d\d-\d\d_.*\n +host +: {re.escape(host)}\n +rank +: 0 ", report), report
    assert re.search(r"exitcode +: 1 \(pid: \d+\)", report), report
    assert "KeyError: 'recorded'" in report
    assert "in main" in report.partition("traceback :")[2]
    assert "last words" in report.partition("last lines of stderr:")[2]


def test_only_the_signals_that_were_asked_for_are_handled(launcher, tmp_path, wait_for):
    agent = launcher.run("--signals-to-handle", "SIGUSR1", "signals.py", tmp_path, "polite")
    wait_for((tmp_path / "ready").exists, "the worker", agent)
    os.kill(agent.pid, signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1
    launcher.wait_until_empty()


def test_a_machine_that_cannot_be_bound_is_one_line(launcher, tmp_path):
    """Exclusive cores for more workers than there are cores, on this very machine."""
    count = len(os.sched_getaffinity(0)) + 1
    agent = launcher.run("--nproc-per-node", count, "--numa-binding", "exclusive", "showing.py", tmp_path / "facts")
    assert agent.wait() == 1
    assert "Traceback" not in agent.output
    assert re.search(r"^phalanx run: .*exclusive|^phalanx run: .*NUMA|^phalanx run: .*core", agent.output, re.M), (
        agent.output
    )
    assert not (tmp_path / "facts.0").exists()
    launcher.wait_until_empty()


def test_run_path_and_a_directory_as_script(launcher, tmp_path):
    package = tmp_path / "app"
    package.mkdir()
    (package / "__main__.py").write_text("import sys\nprint('ran', __name__, sys.argv[1:])\n")
    agent = launcher.run("--run-path", "--no-python", package, "x")
    assert agent.wait() == 0, agent.output
    assert "ran __main__ ['x']" in agent.output


class CountingServer(HealthCheckServer):
    def __init__(self) -> None:
        super().__init__(lambda: 0.0, 0, 1)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


def test_health_hook_metrics_and_redirects_of_a_function_job(tmp_path):
    path, server = tmp_path / "metrics.jsonl", CountingServer()
    config = LaunchConfig(
        1, 1, 1, start_method="fork", max_restarts=0, metrics_cfg={"type": "jsonl", "path": str(path)},
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ERR),
    )  # fmt: skip
    with pytest.raises(ChildFailedError, match="last lines of stderr") as caught:
        elastic_launch(config, functions.raising, server)()
    assert server.calls == ["start", "stop"]
    assert any("Custom" in line for line in caught.value.get_first_failure()[1].stderr_tail)
    names = {json.loads(line)["name"] for line in path.read_text().splitlines()}
    assert {"workers.started", "workers.failed", "generations.fail", "rendezvous.duration.ms"} <= names


def test_one_failure_counts_once_whoever_is_stopped_because_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    config = LaunchConfig(
        1, 1, 3, start_method="fork", max_restarts=1, metrics_cfg={"type": "jsonl", "path": str(path)},
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs")),
    )  # fmt: skip
    assert elastic_launch(config, functions.killed_once)(1) == {0: 0, 1: 1, 2: 2}
    counted = Counter(json.loads(line)["name"] for line in path.read_text().splitlines())
    assert counted["workers.failed"] == 1, counted
    assert (counted["workers.started"], counted["workers.succeeded"]) == (6, 3)


@pytest.mark.fast
def test_who_only_lost_contact_is_counted_apart_and_nobody_twice():
    seen = []

    class Remembering(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            seen.append(metric_data.name)

    observer = Observer("job", metrics=Metrics(Remembering()))
    killed = ProcessFailure(local_rank=1, pid=7, exitcode=-9, message="killed by SIGKILL")
    said = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
    complains = ProcessFailure(local_rank=0, pid=8, exitcode=1, message=said)
    for failure in (killed, complains, killed):
        observer.worker_failed(failure)
    assert seen == ["workers.failed", "workers.lost_contact"]


def test_a_taken_health_or_metrics_port_costs_a_warning_not_the_job(tmp_path, caplog, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", port)
        config = LaunchConfig(
            1, 1, 1, start_method="fork", max_restarts=0, metrics_cfg={"type": "prometheus", "port": port},
            logs_specs=DefaultLogsSpecs(str(tmp_path / "logs")),
        )  # fmt: skip
        assert elastic_launch(config, functions.add)(2, 3) == {0: (0, 5)}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [
        f"no metrics: type=prometheus, port={port}: ",
        f"no health check: it cannot listen on port {port}: ",
    ] == [text.partition("[Errno")[0] for text in warnings]
