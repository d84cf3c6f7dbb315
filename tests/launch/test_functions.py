"""Function workers: values and exceptions come home whole, under every start method."""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

from phalanx.launch import (
    ChildFailedError,
    DefaultLogsSpecs,
    LaunchConfig,
    LocalElasticAgent,
    RendezvousParameters,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    elastic_launch,
    metrics,
)
from phalanx.launch.rendezvous import get_rendezvous_handler
from phalanx.launch.workers._start import method_that_works, why_only_here

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import functions

pytestmark = pytest.mark.timeout(300)  # some import torch anew, which takes a minute on a machine that is very busy


def config(tmp_path: Path, **fields: object) -> LaunchConfig:
    defaults = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 0}
    return LaunchConfig(**{**defaults, "logs_specs": DefaultLogsSpecs(str(tmp_path / "logs")), **fields})


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_return_values_by_global_rank(tmp_path, method):
    result = elastic_launch(config(tmp_path, start_method=method), functions.all_reduced)(1.0)
    assert result == {0: 3.0, 1: 3.0}


def test_config_is_not_changed_by_a_launch(tmp_path):
    given = config(tmp_path, start_method="fork", rdzv_configs={"lease": 9}, metrics_cfg={"type": "null"})
    before, logs_before = copy.copy(vars(given)), copy.deepcopy(vars(given.logs_specs))
    configs_before = (dict(given.rdzv_configs), dict(given.metrics_cfg))
    for _ in range(2):
        assert elastic_launch(given, functions.add)(2, 3) == {0: (0, 5), 1: (1, 5)}
    assert vars(given) == before
    assert (given.rdzv_configs, given.metrics_cfg) == configs_before
    assert vars(given.logs_specs) == logs_before
    assert len(list((tmp_path / "logs").iterdir())) == 2  # a config used twice: two runs, two directories


def test_large_values_come_home(tmp_path):
    result = elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.large)(3_000_000)
    assert torch.equal(result[0], torch.arange(3_000_000))


def test_exceptions_come_home(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.raising)()
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode) == (0, 1)
    assert failure.message == "Custom: ('with this text', 17)"
    assert "raise Custom" in failure.traceback
    assert isinstance(caught.value.__cause__, functions.Custom)
    assert caught.value.__cause__.args == ("with this text", 17)


def test_large_exceptions_come_home_whole(tmp_path):
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), functions.raising_large)(3_000_000)
    assert caught.value.__cause__.args == ("x" * 3_000_000,)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (functions.returning_one_way, "its return value cannot be unpickled: TypeError"),
        (functions.unpicklable, "its return value, a function, cannot be pickled"),
    ],
    ids=["one way", "unpicklable"],
)
def test_a_value_that_cannot_travel_is_a_clear_error_at_once(tmp_path, function, complaint):
    """The function would return the same again: no restart is spent on it."""
    given = config(tmp_path, nproc_per_node=1, start_method="fork", max_restarts=3)
    with pytest.raises(ChildFailedError, match=complaint) as caught:
        elastic_launch(given, function)()
    assert caught.value.get_first_failure()[1].generation == 0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (functions.raising_one_way, "OneWay: an exception (5)"),
        (functions.raising_unpicklable, "Custom: holds a function"),
    ],
    ids=["one way", "unpicklable"],
)
def test_an_exception_that_cannot_travel_is_still_reported(tmp_path, function, text):
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, nproc_per_node=1, start_method="fork"), function)()
    _, failure = caught.value.get_first_failure()
    assert (failure.message, failure.exception) == (text, None)
    assert "raise " in failure.traceback


def test_sys_exit_in_a_function_is_its_exit_code(tmp_path):
    one = {"nproc_per_node": 1, "start_method": "fork"}
    assert elastic_launch(config(tmp_path, **one), functions.ending)(0) == {0: None}
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, **one), functions.ending)(7)
    assert caught.value.get_first_failure()[1].exitcode == 7


def test_an_unpicklable_function_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be pickled .*use start_method='fork'"):
        elastic_launch(config(tmp_path, start_method="spawn"), lambda: 1)()


def test_closures_work_with_fork(tmp_path):
    bonus = 5
    result = elastic_launch(config(tmp_path, start_method="fork"), lambda: bonus)()
    assert result == {0: 5, 1: 5}


def test_commands_have_no_values(tmp_path):
    launched = elastic_launch(config(tmp_path), sys.executable)
    assert launched("-c", "import os; assert os.environ['LOCAL_RANK'] in '01'") == {0: None, 1: None}


def test_a_missing_command_fails_at_once(tmp_path):
    with pytest.raises(ChildFailedError, match="cannot execute '/no/such/command'"):
        elastic_launch(config(tmp_path, max_restarts=5), "/no/such/command")()


class Telling(metrics.MetricHandler):
    """Keeps the last value of each name."""

    def __init__(self, told: dict[str, float]) -> None:
        self.told = told

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.told[metric_data.name] = metric_data.value


def test_agent_tells_about_its_workers(tmp_path):
    """The agent as users of the elastic API build it, looked at from another thread while it runs."""
    seen: list[WorkerGroup] = []
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "looking", 1, 1))
    spec = WorkerSpec(
        role="r",
        local_world_size=2,
        rdzv_handler=handler,
        entrypoint=functions.waiting,
        args=(str(tmp_path / "go"),),
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), start_method="forkserver")
    assert agent.get_worker_group().state is WorkerState.INIT

    def look() -> None:
        while agent.get_worker_group().state is not WorkerState.HEALTHY:
            time.sleep(0.01)
        seen.append(agent.get_worker_group())
        (tmp_path / "go").touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    told: dict[str, float] = {}
    metrics.configure(Telling(told))
    try:
        result = agent.run()
    finally:
        metrics.configure(metrics.NullMetricHandler())
        (tmp_path / "go").touch()
        watcher.join()
        handler.shutdown()
    in_torchs_words = {"run_total": 1, "run_success_no_retries": 1, "run_success_with_retries": 0, "flakiness": 0}
    assert told.items() >= {f"workers.r.{name}": value for name, value in in_torchs_words.items()}.items()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: 0, 1: 1})
    assert not result.is_failed()
    assert [worker.global_rank for worker in seen[0].workers] == [0, 1]
    assert all(isinstance(worker.id, int) for worker in seen[0].workers)
    assert (seen[0].group_rank, seen[0].group_world_size) == (0, 1)
    assert WorkerState.is_running(seen[0].state)
    assert agent.restart_count == 0
    assert time.time() - agent.alive_time() < 600


def test_a_forked_function_leaves_alone_what_belongs_to_its_caller(tmp_path):
    """Exit functions and temporary directories of the caller are not the worker's; queues carry what it puts in."""
    ended = tmp_path / "ended"
    queue = multiprocessing.get_context("fork").Queue()
    queue.put("from the caller")  # starts the thread that feeds it, which no fork has
    assert queue.get(timeout=90) == "from the caller"

    def draw() -> tuple[float, int]:
        atexit.register(lambda: ended.open("a").write("own\n"))
        queue.put(int(os.environ["RANK"]))
        return numpy.random.rand(), torch.initial_seed()

    def ends_in_caller_only() -> None:
        ended.open("a").write("caller's\n")

    torch.initial_seed()  # the caller's generator is seeded before the fork
    atexit.register(ends_in_caller_only)
    try:
        with tempfile.TemporaryDirectory() as directory:
            drawn = elastic_launch(config(tmp_path, start_method="fork"), draw)()
            assert Path(directory).exists()
    finally:
        atexit.unregister(ends_in_caller_only)
    assert {queue.get(timeout=90) for _ in range(2)} == {0, 1}
    assert drawn[0][0] != drawn[1][0]
    assert len({drawn[0][1], drawn[1][1], torch.initial_seed()}) == 3
    assert ended.read_text() == "own\nown\n"
    queue.close()
    queue.join_thread()


SESSION = """
import torch
from phalanx.launch import LaunchConfig, elastic_launch

class Thing:
    def __init__(self, value):
        self.value = value

def train(thing):
    threads = torch.get_num_threads()
    product = torch.ones(600, 600) @ torch.ones(600, 600)
    return Thing((thing.value * product[0, 0].item(), threads))

torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)  # starts a pool of threads, which no fork has
for size in (1, 2):
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=size)
    results = elastic_launch(config, train)(Thing(3.0))
    print("results", sorted((rank, thing.value) for rank, thing in results.items()))
"""


def test_functions_of_an_interactive_session_are_forked(tmp_path):
    """As in a notebook: no file holds the function, a class of its arguments or the result, and torch has computed."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-"], input=SESSION, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "results [(0, (1800.0, 2))]\nresults [(0, (1800.0, 1)), (1, (1800.0, 1))]\n" in done.stdout, done.stdout
    assert done.stderr.count("its workers are forked from this process (start_method='fork', not 'spawn')") == 2


@pytest.mark.fast
def test_what_no_file_holds_is_recognised(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    source = "def from_file(): pass"
    script.write_text(source)
    main = ModuleType("__main__")
    exec(compile(source, str(script), "exec"), main.__dict__)
    exec("def typed(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__file__ = str(script)
    assert why_only_here(main.from_file, ()) == ""
    assert "typed was typed into" in why_only_here(main.typed, ())  # after python -i script.py
    assert why_only_here(functions.add, (1, 2)) == ""
    del main.__file__
    assert "from_file or its arguments are defined in" in why_only_here(main.from_file, ())
    assert "add or its arguments are defined in" in why_only_here(functions.add, (main.typed, 2))
    assert method_that_works(main.typed, (), "spawn") == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(TypeError, match=r"this process has used CUDA.*%%writefile"):
        method_that_works(main.typed, (), "spawn")
