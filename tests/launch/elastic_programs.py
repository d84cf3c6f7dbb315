"""Programs of the kind that torch's documentation of Distributed Elastic shows, for torch's modules and for ours.

``python elastic_programs.py torch.distributed.elastic`` and ``... phalanx.launch`` differ in that one word. Each
program returns what its user would see; all are printed as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = sys.argv[1] if __name__ == "__main__" else "phalanx.launch"
server = importlib.import_module(f"{ROOT}.agent.server")
mp = importlib.import_module(f"{ROOT}.multiprocessing")
errors = importlib.import_module(f"{ROOT}.multiprocessing.errors")
rendezvous = importlib.import_module(f"{ROOT}.rendezvous")
registry = importlib.import_module(f"{ROOT}.rendezvous.registry")
timer = importlib.import_module(f"{ROOT}.timer")
events = importlib.import_module(f"{ROOT}.events")
metrics = importlib.import_module(f"{ROOT}.metrics")
launcher = importlib.import_module(
    "phalanx.launch.api" if ROOT == "phalanx.launch" else "torch.distributed.launcher.api"
)


class OneNode(rendezvous.RendezvousHandler):  # type: ignore[misc, name-defined]
    """A rendezvous of one node, with a store of its own for each round."""

    def __init__(self, params: Any) -> None:
        self.params = params
        self.rounds = 0
        self.closed = False

    def get_backend(self) -> str:
        return "one"

    def get_run_id(self) -> str:
        return str(self.params.run_id)

    def next_rendezvous(self) -> Any:
        self.rounds += 1
        store = dist.PrefixStore(str(self.rounds), dist.HashStore())
        where = rendezvous.RendezvousStoreInfo.build(0, store, "localhost")
        return rendezvous.RendezvousInfo(store, 0, 1, where)

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self.closed = True
        return True


rendezvous.rendezvous_handler_registry.register("one", OneNode)


def one_node() -> Any:
    return registry.get_rendezvous_handler(rendezvous.RendezvousParameters("one", "", "job", 1, 1))


class PopenAgent(server.SimpleElasticAgent):  # type: ignore[misc, name-defined]
    """An agent that starts its workers by itself."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, exit_barrier_timeout=5)
        self.calls: list[str] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self.calls.append("start")
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        for worker in worker_group.workers:
            place = f"{worker.global_rank} {worker.world_size} {worker.role_rank} {worker.role_world_size}"
            env = {"PLACE": place, "RESTARTS": str(restarts), "RANK": str(worker.global_rank)}
            command = ["sh", "-c", worker_group.spec.args[0]]
            self.processes[worker.local_rank] = subprocess.Popen(command, env={**os.environ, **env})
        return {rank: process.pid for rank, process in self.processes.items()}

    def _monitor_workers(self, worker_group: Any) -> Any:
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        if any(codes.values()):
            failures = {
                worker_group.workers[rank].global_rank: errors.ProcessFailure(rank, self.processes[rank].pid, code, "")
                for rank, code in codes.items()
                if code
            }
            return server.RunResult(server.WorkerState.FAILED, failures=failures)
        if all(code == 0 for code in codes.values()):
            values = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
            return server.RunResult(server.WorkerState.SUCCEEDED, return_values=values)
        return server.RunResult(server.WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: Any) -> None:
        self.calls.append("stop")
        self._end()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append("shutdown")
        self._end()

    def _end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Collect(metrics.MetricHandler):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def emit(self, metric_data: Any) -> None:
        self.seen.append((metric_data.group_name, metric_data.name))


def custom_agent(folder: Path) -> Any:
    """A custom agent on a custom rendezvous, with a failure that a restart cures and one that none is left for."""
    collect = Collect()
    metrics.configure(collect)
    found = []
    for max_restarts in (2, 0):
        handler = one_node()
        spec = server.WorkerSpec(
            "trainer",
            2,
            handler,
            entrypoint="sh",
            args=(f'echo "$PLACE" > {folder}/place$RANK; [ "$RESTARTS$RANK" != 01 ] || exit 7',),
            max_restarts=max_restarts,
            monitor_interval=0.02,
        )
        agent = PopenAgent(spec)
        result = agent.run()
        group = agent.get_worker_group()
        event = agent.get_event_succeeded()
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        found.append([result.state.name, result.is_failed(), result.return_values, codes, agent.calls, handler.rounds])
        found.append([group.state.name, group.group_rank, group.group_world_size, len(group.workers)])
        found.append([event.name, event.source.name, sorted(event.metadata), event.metadata["agent_restarts"]])
    places = [(folder / f"place{rank}").read_text() for rank in range(2)]
    rare = {"workers.trainer.healthy"}  # depends on when the agent looks
    counted = {name for group_name, name in collect.seen if group_name == "torchelastic"} - rare
    metrics.configure(metrics.NullMetricHandler())
    wanted = {name for name in counted if not name.startswith("SimpleElasticAgent._assign_worker_ranks")}
    return [found, places, sorted(wanted)]


def add(a: int, b: int) -> int:
    print("sum of", a, b, flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    return a + b


def refuse(a: int) -> None:
    if a:
        raise ValueError(f"no {a}")
    time.sleep(60)


def processes_with_logs(folder: Path) -> Any:
    """Functions and commands with redirected and copied output, values and failures."""
    found: list[Any] = []
    specs = mp.DefaultLogsSpecs(str(folder / "good"), redirects=mp.Std.ALL, tee={0: mp.Std.OUT})
    context = mp.start_processes("sums", add, {0: (1, 2), 1: (3, 4)}, {0: {}, 1: {}}, specs, start_method="fork")
    result = context.wait(period=0.05)
    files = [Path(path).read_text() for part in (result.stdouts, result.stderrs) for path in part.values()]
    found.append([sorted(result.return_values.items()), result.failures, result.is_failed(), files])
    found.append([sorted(context.pids()), context.nprocs, context.name, type(context).__name__])
    specs = mp.DefaultLogsSpecs(str(folder / "bad"), redirects=mp.Std.ALL)
    context = mp.start_processes("refusals", refuse, {0: (0,), 1: (7,)}, {0: {}, 1: {}}, specs, start_method="fork")
    failures = context.wait(period=0.05).failures
    data = failures[1].error_file_data["message"]
    found.append(
        [sorted(failures), failures[1].exitcode, data["message"], "refuse" in data["extraInfo"]["py_callstack"]]
    )
    found.append([failures[1].signal_name(), Path(failures[1].error_file).name, failures[1].local_rank])
    specs = mp.DefaultLogsSpecs(str(folder / "command"), redirects={0: mp.Std.OUT})
    args = {0: ("-c", "echo $WORD; exit 3"), 1: ("-c", "sleep 60")}
    context = mp.start_processes("command", "sh", args, {0: {"WORD": "x"}, 1: {"WORD": "y"}}, specs)
    result = context.wait(period=0.05)
    codes = {rank: (each.exitcode, each.signal_name()) for rank, each in sorted(result.failures.items())}
    found.append([codes, Path(result.stdouts[0]).read_text(), result.stdouts[1], type(context).__name__])
    context = mp.start_processes("sleep", "sleep", {0: (60,)}, {0: {}}, mp.DefaultLogsSpecs(str(folder / "sleep")))
    found.append([context.wait(0), context.wait(0.1, 0.05)])
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        context.wait(5)
    except mp.SignalException as error:
        found.append(error.sigval.name)
        context.close(error.sigval, timeout=5)
    try:
        mp.start_processes("odd", "true", {0: ()}, {1: {}}, mp.DefaultLogsSpecs(str(folder / "odd")))
    except RuntimeError:
        found.append("ranks without an environment are refused")
    return found


def recorded_errors(folder: Path) -> Any:
    """What ``record`` does with returns, exits and errors, and what reads its file."""
    path = folder / "error.json"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    heard: list[str] = []

    class Handler(errors.ErrorHandler):  # type: ignore[misc, name-defined]
        def initialize(self) -> None:
            heard.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            heard.append(type(e).__name__)
            super().record_exception(e)

    def main(what: str) -> str:
        if what == "fail":
            raise KeyError("x")
        if what.startswith("exit"):
            sys.exit(int(what[-1]))
        return what

    recorded = errors.record(main, error_handler=Handler())
    found: list[Any] = [recorded("value"), recorded("exit 0"), main.__name__ == recorded.__name__]
    for what in ("exit 3", "fail"):
        try:
            recorded(what)
        except BaseException as error:
            found.append([type(error).__name__, path.exists()])
    failure = errors.ProcessFailure(1, 4711, 1, str(path))
    killed = errors.ProcessFailure(local_rank=0, pid=4712, exitcode=-9, error_file="/nonexistent")
    found.append([heard, failure.error_file_data["message"]["message"], killed.signal_name(), failure.signal_name()])
    first = errors.ChildFailedError("train.py", {3: failure, 2: killed}).get_first_failure()[0]
    path.unlink()

    @errors.record
    def nanny() -> None:
        child = folder / "child.json"
        child.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"timestamp": "5"}}}))
        raise errors.ChildFailedError("train.py", {3: errors.ProcessFailure(1, 4711, -11, str(child))})

    try:
        nanny()
    except errors.ChildFailedError as error:
        copied = json.loads(path.read_text())["message"]
        found.append(
            [first, error.get_first_failure()[0], copied["message"], copied["errorCode"], "train.py" in str(error)]
        )
    return found


def overstay(queue: Any) -> None:
    timer.configure(timer.LocalTimerClient(queue))
    with timer.expires(after=60):
        pass
    with timer.expires(after=0.2, scope="slow"):
        time.sleep(60)


def timers(folder: Path) -> Any:
    """A worker that overstays is killed; one with no client is told."""
    found: list[Any] = []
    try:
        with timer.expires(after=1):
            pass
    except RuntimeError:
        found.append("no client")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    timers_of_all = timer.LocalTimerServer(queue, max_interval=0.05)
    timers_of_all.start()
    process = context.Process(target=overstay, args=(queue,))
    process.start()
    process.join(60)
    timers_of_all.stop()
    found.append(process.exitcode)
    requests = [timer.TimerRequest(1, "a", 5.0), timer.FileTimerRequest(7, "b", -1, signal=9)]
    found.append([requests[0] == timer.TimerRequest(1, "a", 5.0), requests[1].worker_pid, requests[1].to_json()])
    timers_of_all.register_timers([timer.TimerRequest(1, "a", 5.0), timer.TimerRequest(2, "b", 9.0)])
    found.append(sorted(timers_of_all.get_expired_timers(6.0)))
    timers_of_all.register_timers([timer.TimerRequest(1, "a", -1)])
    found.append(sorted(timers_of_all.get_expired_timers(10.0)))
    timers_of_all.clear_timers({2})
    found.append(sorted(timers_of_all.get_expired_timers(10.0)))
    return found


def told(folder: Path) -> Any:
    """Events and metrics."""
    event = events.Event("saved", events.EventSource.WORKER, 7, {"step": 3, "note": None})
    again = events.Event.deserialize(event.serialize())
    happened = events.RdzvEvent("n", "run", "m", "host", 1, events.NodeState.RUNNING, rank=2)
    found: list[Any] = [event.serialize(), str(event), again == event, events.Event.deserialize(event) is event]
    found.append([happened.serialize(), events.RdzvEvent.deserialize(happened.serialize()) == happened])
    events.record(event)
    events.construct_and_record_rdzv_event("run", "m", events.NodeState.FAILED)
    found.append(type(events.get_logging_handler()).__name__)
    collect = Collect()
    metrics.configure(collect)
    metrics.configure(metrics.NullMetricHandler(), "quiet")

    class Bar:
        @metrics.prof
        def good(self) -> int:
            return 1

        @metrics.prof(group="g")
        def bad(self) -> None:
            raise KeyError

    found.append(Bar().good())
    try:
        Bar().bad()
    except KeyError:
        pass
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 1, "quiet")
    metrics.getStream("stream").add_value("c", 2)
    metrics.MetricsConfig({"a": "b"}).params["a"]
    metrics.configure(metrics.NullMetricHandler())
    return [*found, collect.seen, metrics.get_elapsed_time_ms(time.time()) < 1000]


def joined(word: str) -> str:
    """What a worker of ``launched`` computes, with the ranks that the launcher gave it."""
    if word == "fails" and os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    words = [""] * dist.get_world_size()
    dist.all_gather_object(words, f"{word} {rank} of {os.environ['LOCAL_WORLD_SIZE']}")
    dist.destroy_process_group()
    return " ".join(words)


def launched(folder: Path) -> Any:
    found: list[Any] = []
    for word in ("works", "fails"):
        config = launcher.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=f"run-{word}",
            role="sums",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
        )
        try:
            found.append(launcher.elastic_launch(config, joined)(word))
        except errors.ChildFailedError as error:
            rank, first = error.get_first_failure()
            found.append([rank, first.exitcode, sorted(error.failures)])
    return found


PROGRAMS = (custom_agent, processes_with_logs, recorded_errors, timers, told, launched)

if __name__ == "__main__":
    results = {}
    for program in PROGRAMS:
        with tempfile.TemporaryDirectory() as where:
            results[program.__name__] = program(Path(where))
    print("RESULT " + json.dumps(results))
