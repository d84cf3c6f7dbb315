"""Trackers: one run over regroups and restarts, each step once, and a failing one fails nobody."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from elastic_training import make_job, train

from phalanx.comm import simulate
from phalanx.elastic import RunOptions, Tracker
from phalanx.elastic._tracking import Tracking
from phalanx.integrations.trackers import MLflow, TensorBoard, Trackio, WandB

pytestmark = pytest.mark.fast


class Server:
    """What a tracker's server remembers: of each run the steps, in the order in which they came."""

    def __init__(self) -> None:
        self.runs: dict[str, list[int]] = {}
        self.values: dict[int, dict[str, float]] = {}


class Remembered:
    """A worker's way to the server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.num_begun = self.num_closed = 0

    def begin(self, run: str, step: int) -> int:
        self.num_begun += 1
        self.run = run
        return max([step, *(done + 1 for done in self.server.runs.setdefault(run, []))])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.server.runs[self.run].append(step)
        self.server.values[step] = dict(values)

    def close(self) -> None:
        self.num_closed += 1


def test_the_next_first_worker_goes_on_with_the_run_and_repeats_nothing() -> None:
    server = Server()
    first, second = (Remembered(server) for _ in range(2))
    before, after = Tracking([first], "run"), Tracking([second], "run")
    for step in range(3):
        before.tell(step, {"loss": 1.0, "grad_norm": None})
    for step in (2, 3):  # the one that died had told of step 2, which nobody can know
        after.tell(step, {"loss": 1.0})
    again = Tracking([Remembered(server)], "run")  # all were lost: from the save of step 1 on
    for step in range(1, 6):
        again.tell(step, {"loss": 1.0})
    assert server.runs == {"run": [0, 1, 2, 3, 4, 5]}
    assert server.values[0] == {"loss": 1.0}
    after.close()
    assert (second.num_begun, second.num_closed) == (1, 1)


def test_what_a_lost_worker_told_in_vain_is_told_again() -> None:
    """Its tracker had taken steps 3 and 4, and not passed them on."""
    server = Server()
    first, second = (Tracking([Remembered(server)], "run") for _ in range(2))
    for step in range(5):
        first.tell(step, {"loss": 1.0 / (step + 1)})
        second.keep(step, {"loss": 1.0 / (step + 1), "grad_norm": None})
    del server.runs["run"][3:], server.values[3], server.values[4]

    class Lacking(Remembered):
        def begin(self, run: str, step: int) -> int:
            super().begin(run, step)
            return len(server.runs[run])

    after = Tracking([Lacking(server)], "run")
    after._kept = second._kept
    after.tell(5, {"loss": 1.0 / 6})
    after.tell(6, {"loss": 1.0 / 7})
    assert server.runs == {"run": list(range(7))}
    assert server.values == {step: {"loss": 1.0 / (step + 1)} for step in range(7)}


def test_workers_that_do_not_log_keep_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.elastic._tracking.KEPT", 3)
    kept: dict[int, list[tuple[int, dict[str, float]]]] = {}

    def run(group: Any) -> None:
        job = make_job(run=RunOptions(progress=False, group=group), trackers=[Remembered(Server())])
        train(job, max_steps=5)
        job.close()
        kept[group.rank] = list(job.tracking._kept)

    simulate(2).run(run)
    assert [step for step, _ in kept[1]] == [2, 3, 4], "the last three"
    assert kept[0] == kept[1], "the same values, bit for bit"


def test_only_the_first_worker_of_a_job_opens_its_tracker() -> None:
    servers = [Server() for _ in range(2)]
    opened: list[tuple[int, int]] = []

    def run(group: Any) -> None:
        mine = Remembered(servers[group.rank])
        job = make_job(run=RunOptions(progress=False, group=group), trackers=[mine])
        train(job, max_steps=4)
        job.close()
        opened.append((group.rank, mine.num_begun))

    simulate(2).run(run)
    assert sorted(opened) == [(0, 1), (1, 0)]
    assert list(servers[0].runs.values()) == [[0, 1, 2, 3]]
    assert servers[1].runs == {}
    assert set(servers[0].values[3]) == {"loss", "grad_norm", "epoch", "workers"}


def test_a_tracker_that_fails_is_said_once_and_left_out(capsys: Any) -> None:
    class Failing(Remembered):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise ConnectionError("no answer")

    server = Server()
    tracking = Tracking([Failing(Server()), Remembered(server)], "run")
    for step in range(3):
        tracking.tell(step, {"loss": 1.0})
    assert server.runs == {"run": [0, 1, 2]}
    assert capsys.readouterr().err.count("the tracker Failing failed: ConnectionError: no answer") == 1
    with pytest.raises(TypeError, match=r"trackers has a int; expected objects with begin\(run, step\)"):
        Tracking([7], "run")  # type: ignore[list-item]


def test_an_absent_package_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracking([WandB("project")], "run").tell(0, {"loss": 1.0})
    assert "pip install wandb" in capsys.readouterr().err


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A package of this name that records, for one that need not be installed here."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_adapters_call_their_packages_as_these_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(name: str, answer: Any = None) -> Any:
        return lambda *args, **kwargs: calls.append((name, args, kwargs)) or answer

    writer = SimpleNamespace(add_scalar=noted("add_scalar"), flush=noted("flush"), close=noted("close"))
    fake(monkeypatch, "torch.utils.tensorboard", SummaryWriter=noted("SummaryWriter", writer))
    wandb_run = SimpleNamespace(step=2, log=noted("log"), finish=noted("finish"))
    fake(monkeypatch, "wandb", init=noted("init", wandb_run), Settings=SimpleNamespace)
    fake(monkeypatch, "trackio", init=noted("init"), log=noted("log"), finish=noted("finish"))
    info = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = SimpleNamespace(
        get_experiment_by_name=noted("get_experiment_by_name", SimpleNamespace(experiment_id="e1")),
        search_runs=noted("search_runs", [info]),
        get_metric_history=noted("get_metric_history", [SimpleNamespace(step=6)]),
        log_batch=noted("log_batch"),
        set_terminated=noted("set_terminated"),
    )
    entities = SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step))
    fake(monkeypatch, "mlflow", MlflowClient=noted("MlflowClient", client), entities=entities)
    found = {}
    for tracker in (TensorBoard("runs"), WandB("p"), MLflow("e"), Trackio("p", name="mine")):
        assert isinstance(tracker, Tracker)
        calls.clear()
        first = tracker.begin("job7", 3)
        tracker.log(first, {"loss": 0.5})
        tracker.close()
        tracker.close()
        found[type(tracker).__name__] = (first, list(calls))
    assert found["TensorBoard"] == (3, [
        ("SummaryWriter", ("runs/job7",), {"purge_step": 3}), ("add_scalar", ("loss", 0.5, 3), {}),
        ("flush", (), {}), ("close", (), {}),
    ])  # fmt: skip
    assert found["WandB"] == (2, [  # what its server lacks, though the job is further
        ("init", (), {"project": "p", "id": "job7", "resume": "allow"}), ("log", ({"loss": 0.5},), {"step": 2}),
        ("finish", (), {}),
    ])  # fmt: skip
    first, told = found["MLflow"]
    assert first == 7
    assert ("log_batch", ("r1", [("loss", 0.5, 7)]), {}) in told
    assert told[-1] == ("set_terminated", ("r1",), {})
    assert found["Trackio"] == (3, [
        ("init", (), {"project": "p", "name": "mine", "resume": "allow"}), ("log", ({"loss": 0.5},), {"step": 3}),
        ("finish", (), {}),
    ])  # fmt: skip
