"""What torch's Distributed Elastic offers beyond the command line, with real processes where those matter."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.elastic.rendezvous as theirs

from phalanx.launch import LaunchConfig, WorkerSpec, elastic_launch
from phalanx.launch.agent import server
from phalanx.launch.hang._kernel_watch import ENV_TIMEOUT, choose_timeout
from phalanx.launch.multiprocessing import DefaultLogsSpecs, PContext, ProcessFailure, RunProcsResult
from phalanx.launch.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
    _registry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from phalanx.launch.timer import FileTimerClient, FileTimerRequest, FileTimerServer

PATIENCE = 100.0


# -- agents -----------------------------------------------------------------------------------------------------------


class ScriptedAgent(server.SimpleElasticAgent):
    """Its workers are what ``states`` says, generation by generation; the last one is repeated."""

    def __init__(self, spec: WorkerSpec, states: list[server.WorkerState]) -> None:
        super().__init__(spec, exit_barrier_timeout=PATIENCE)
        self.states = states
        self.groups: list[tuple[Any, ...]] = []
        self.num_stops = 0

    def _start_workers(self, worker_group: server.WorkerGroup) -> dict[int, Any]:
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        self.groups.append((worker_group.group_rank, worker_group.group_world_size, ranks))
        worker_group.store.set(f"{worker_group.group_rank}", str(len(self.groups)))
        peer = (worker_group.group_rank or 0) + 1
        worker_group.store.get(str(peer % (worker_group.group_world_size or 1)))
        return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: server.WorkerGroup) -> server.RunResult:
        state = self.states[min(len(self.groups), len(self.states)) - 1]
        result = server.RunResult(state)
        if state is server.WorkerState.FAILED:
            rank = worker_group.workers[0].global_rank
            result.failures = {rank: ProcessFailure(0, 4711, 3, "")}
        return result

    def _stop_workers(self, worker_group: server.WorkerGroup) -> None:
        self.num_stops += 1

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.num_stops += 100


def two_nodes(port: int, states: list[list[server.WorkerState]], max_restarts: int) -> tuple[list[Any], list[Any]]:
    """Run an agent on each of two nodes, in threads; the agents, and what each ended with."""
    ended: list[Any] = [None, None]
    agents: list[Any] = [None, None]

    def run(node: int) -> None:
        params = RendezvousParameters(
            "c10d", f"localhost:{port}", "job", 2, 2, is_host=node == 0, last_call_timeout=0.2
        )
        handler = get_rendezvous_handler(params)
        spec = WorkerSpec("r", 1 + node, handler, entrypoint="x", max_restarts=max_restarts, monitor_interval=0.02)
        agents[node] = ScriptedAgent(spec, states[node])
        try:
            ended[node] = agents[node].run()
        except Exception as error:
            ended[node] = error
        done.wait(PATIENCE)  # who serves the store stays until the other is done
        handler.shutdown()

    done = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return agents, ended


HEALTHY, FAILED, SUCCEEDED = server.WorkerState.HEALTHY, server.WorkerState.FAILED, server.WorkerState.SUCCEEDED


def test_a_failure_on_one_node_starts_the_workers_of_custom_agents_on_all_anew(held_port: int) -> None:
    agents, ended = two_nodes(held_port, [[HEALTHY, SUCCEEDED], [FAILED, SUCCEEDED]], max_restarts=1)
    assert [result.state for result in ended] == [SUCCEEDED, SUCCEEDED]
    for agent in agents:
        assert len(agent.groups) == 2
        assert [group[1] for group in agent.groups] == [2, 2]
        assert agent.num_stops == 101
    assert sorted(rank for agent in agents for rank in agent.groups[-1][2]) == [0, 1, 2]
    # the one that failed has used its restart; to the other it was a change of members
    assert [agent._remaining_restarts for agent in agents] == [1, 0]


def test_a_failure_for_good_ends_the_job_for_custom_agents_on_other_nodes(held_port: int) -> None:
    agents, ended = two_nodes(held_port, [[HEALTHY], [FAILED]], max_restarts=0)
    assert ended[1].is_failed()
    assert agents[1].get_worker_group().state is FAILED
    assert isinstance(ended[0], RendezvousClosedError)
    assert "exit code 3" in str(ended[0])
    assert [agent.num_stops for agent in agents] == [101, 101]


@pytest.mark.fast
def test_an_old_name_of_the_entrypoint_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="entrypoint"):
        spec = WorkerSpec("r", 1, None, print)  # type: ignore[arg-type]
    assert (spec.entrypoint, spec.get_entrypoint_name()) == (print, "print")
    with pytest.raises(ValueError, match="nothing to run"):
        WorkerSpec("r", 1, None)  # type: ignore[arg-type]


def test_a_worker_that_the_kernel_holds_ends_the_job_at_once(launcher: Any) -> None:
    script = ("--nproc-per-node", 2, "--max-restarts", 9, "--shutdown-timeout", 1, "held_by_the_kernel.py")
    agent = launcher.run(*script, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="0.5")
    assert agent.wait() == 1
    assert "the kernel holds it (uninterruptible sleep)" in agent.output
    assert "a restart cannot cure that" in agent.output
    launcher.wait_until_empty()


@pytest.mark.fast
def test_the_time_that_the_kernel_may_hold_a_worker_is_what_is_told_else_the_variable() -> None:
    assert choose_timeout(None, {ENV_TIMEOUT: "x"}) == 0
    assert choose_timeout(-1.0, {ENV_TIMEOUT: "3"}) == 0


# -- rendezvous -------------------------------------------------------------------------------------------------------


def test_torchs_own_rendezvous_handler_is_used_as_it_is(launcher: Any, held_port: int) -> None:
    agents = [launcher.script("on_torchs_rendezvous.py", held_port) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output
    lines = [line for agent in agents for line in agent.output.splitlines() if line.startswith("VALUE")]
    assert sorted(lines) == [f"VALUE {rank} 1 2 2 2" for rank in range(2)]
    launcher.wait_until_empty()


class TheirHandler(theirs.RendezvousHandler):
    """A handler derived from torch's class, of one node; ``error`` is raised instead of a generation."""

    error: Exception | None = None
    waiting = 0

    def get_backend(self) -> str:
        return "mine"

    def get_run_id(self) -> str:
        return "job"

    def next_rendezvous(self) -> theirs.RendezvousInfo:
        if self.error is not None:
            raise self.error
        self.waiting = 0
        store = dist.HashStore()
        return theirs.RendezvousInfo(store, 0, 1, theirs.RendezvousStoreInfo.build(0, store, "localhost"))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def shutdown(self) -> bool:
        return True


def test_a_handler_of_torchs_class_tells_of_errors_and_nodes_that_wait(
    monkeypatch: pytest.MonkeyPatch, held_port: int
) -> None:
    handler = TheirHandler()
    monkeypatch.setattr(rendezvous_handler_registry, "_creators", {"mine": lambda params: handler})
    params = RendezvousParameters("mine", "", "job", 1, 1)
    assert get_rendezvous_handler(params) is handler
    agent = ScriptedAgent(WorkerSpec("r", 1, handler, entrypoint="x", monitor_interval=0.02), [HEALTHY, SUCCEEDED])  # type: ignore[arg-type]
    handler.waiting = 0
    threading.Timer(0.3, lambda: setattr(handler, "waiting", 1)).start()
    assert agent.run().state is SUCCEEDED
    assert len(agent.groups) == 2, "a node that waits is let in by a new generation"
    assert agent._remaining_restarts == 3, "which is no failure"

    handler.error = theirs.RendezvousGracefulExitError("not needed")
    config = LaunchConfig(1, 1, 1, rdzv_backend="mine", rdzv_endpoint="x", start_method="fork")
    assert elastic_launch(config, os.getpid)() == {}
    handler.error = theirs.RendezvousClosedError("it is over")
    with pytest.raises(RendezvousClosedError, match="it is over"):
        ScriptedAgent(WorkerSpec("r", 1, handler, entrypoint="x"), [HEALTHY]).run()  # type: ignore[arg-type]
    healing = LaunchConfig(1, 1, 1, rdzv_backend="mine", rdzv_endpoint="x", start_method="fork", on_failure="heal")
    with pytest.raises(ValueError, match="expected 'restart'"):
        elastic_launch(healing, os.getpid)()
    entry = SimpleNamespace(name="mine", load=lambda: lambda: lambda params: handler)  # as for torchrun
    monkeypatch.setattr(rendezvous_handler_registry, "_creators", {})
    found = {"torchrun.handlers": [entry]}
    monkeypatch.setattr(_registry, "entry_points", lambda *, group, name="": found.get(group, []))
    assert get_rendezvous_handler(params) is handler
    assert rendezvous_handler_registry.names() == ["mine"]
    monkeypatch.setattr(handler, "get_backend", lambda: "other")
    with pytest.raises(RuntimeError, match="calls itself 'other'"):
        get_rendezvous_handler(params)


@pytest.mark.fast
def test_a_handler_needs_no_more_than_torchs_methods() -> None:
    mine = {name for name in dir(theirs.RendezvousHandler) if not name.startswith("_")}
    assert {name for name in dir(RendezvousHandler) if not name.startswith("_")} == mine
    assert RendezvousHandler.__abstractmethods__ == theirs.RendezvousHandler.__abstractmethods__


# -- processes, timers, the command -----------------------------------------------------------------------------------


@pytest.mark.fast
def test_a_context_of_ones_own_is_waited_for_and_closed(tmp_path: Path) -> None:
    class Pretend(PContext):
        looks = 0
        closed: tuple[Any, ...] = ()

        def _start(self) -> None:
            self.looks = 0

        def _poll(self) -> RunProcsResult | None:
            self.looks += 1
            return RunProcsResult({0: "value"}) if self.looks > 2 else None

        def pids(self) -> dict[int, int]:
            return {0: 4711}

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            self.closed = (death_sig, timeout)

    before = signal.getsignal(signal.SIGTERM)
    context = Pretend("p", "x", {0: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))
    context.start()
    assert context.wait(0) is None
    result = context.wait(period=0.01)
    assert result is not None
    assert result.return_values == {0: "value"}
    context.close(timeout=3)
    assert context.closed == (signal.SIGTERM, 3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_worker_that_overstays_is_killed_by_its_agents_timers(launcher: Any) -> None:
    script = ("--nproc-per-node", 2, "--max-restarts", 1, "overstaying.py")
    agent = launcher.run(*script, TORCHELASTIC_ENABLE_FILE_TIMER="1")
    assert agent.wait() == 0, agent.output
    assert "overstays in the long block" in agent.output
    assert {"rank 0: DONE 0 1", "rank 1: DONE 1 1"} <= set(agent.output.splitlines())
    failing = launcher.run("--nproc-per-node", 2, "overstaying.py", TORCHELASTIC_ENABLE_FILE_TIMER="1")
    assert failing.wait() == 1
    assert "its timer has expired: the long block" in failing.output
    launcher.wait_until_empty()


@pytest.mark.fast
def test_what_is_no_request_does_not_end_the_timers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait_for: Callable[..., None]
) -> None:
    path, heard = str(tmp_path / "pipe"), []
    timers = FileTimerServer(path, "job", max_interval=0.05, log_event=lambda name, request: heard.append(name))
    timers.start()
    with caplog.at_level(logging.WARNING), open(path, "wb") as pipe:
        pipe.write(b'junk\n{"pid": -1, "scope_id": "all", "expiration_time": 1, "signal": 9}\n{"pid": 1}\n')
        pipe.flush()
        client = FileTimerClient(path, signal=0)  # told, not killed
        client.acquire("here", time.time() - 1)
        wait_for(lambda: "timer expired" in heard, "the timer to expire")
    timers.stop()
    assert heard == ["watchdog started", "timer expired", "watchdog stopped"]
    assert sum("ignored what was written" in record.getMessage() for record in caplog.records) == 3
    assert not os.path.exists(path)
    with pytest.raises(BrokenPipeError, match="no timer server"):
        client.release("here")
    with pytest.raises(RuntimeError, match="too long"):
        client.release("x" * 1000)
    with pytest.raises(ValueError, match="names no process"):
        FileTimerRequest.from_json(FileTimerRequest(0, "a", 1.0, 9).to_json().encode())
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="no pipe"):
        FileTimerServer(str(tmp_path / "file"), "job")


def test_the_launch_module_gives_scripts_their_local_rank(launcher: Any) -> None:
    agent = launcher.launch("--nproc_per_node", 2, "local_rank.py", "--lr", 3)
    other = launcher.launch("--use-env", "local_rank.py", "--lr", 4)
    assert agent.wait() == 0, agent.output
    assert {"rank 0: RANK 0 0 3", "rank 1: RANK 1 1 3"} <= set(agent.output.splitlines())
    assert other.wait() == 0, other.output
    assert "RANK None 0 4" in other.output
    wrong = launcher.launch("--no-python", "true")
    assert wrong.wait() == 2
    assert "--use-env" in wrong.output
