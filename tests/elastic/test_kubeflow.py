"""How far a job is, told to a server that stands for Kubeflow's controller."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from elastic_training import make_job, train

from phalanx.integrations.kubeflow import TrainJobStatus

pytestmark = pytest.mark.fast


class Controller(HTTPServer):
    """Keeps what it was told, and with which token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.told: list[tuple[str, dict]] = []
        self.answer = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/status"


class Endpoint(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def environ_of(controller: Controller, folder: Path) -> dict[str, str]:
    (folder / "token").write_text("the pod's\n")
    return {
        "KUBEFLOW_TRAINER_SERVER_URL": controller.url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
    }


def test_a_job_tells_its_percent_and_its_values(controller, tmp_path):
    tracker = TrainJobStatus(12, interval=0.0, environ=environ_of(controller, tmp_path))
    train(make_job(trackers=[tracker]), max_steps=3)
    tracker.close()
    token, last = controller.told[-1]
    assert token == "Bearer the pod's"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    taken = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict({"trainerStatus": last}).trainer_status
    assert set(json.loads(taken.model_dump_json(by_alias=True, exclude_none=True))) == set(last)
    assert last["progressPercentage"] == 25
    assert "loss" in {metric["name"] for metric in last["metrics"]}
    assert last["estimatedRemainingSeconds"] >= 0


def test_who_goes_on_after_another_closes_with_the_newest_and_not_with_each(controller, tmp_path):
    tracker = TrainJobStatus(10, interval=3600.0, environ=environ_of(controller, tmp_path))
    for begun in (0, 5):
        assert tracker.begin("run", begun) == begun
        for step in range(begun, begun + 5):
            tracker.log(step, {"loss": 1.0})
        tracker.close()
    percents = [told["progressPercentage"] for _, told in controller.told]
    assert percents[-1] == 100
    assert 50 in percents
    assert len(percents) <= 4, "at most the first and the last of each"


def test_a_controller_that_refuses_is_said_once(controller, tmp_path, caplog):
    controller.answer = 403
    tracker = TrainJobStatus(10, interval=0.0, environ=environ_of(controller, tmp_path))
    with caplog.at_level(logging.WARNING):
        for begun in (0, 1):
            tracker.begin("run", begun)
            tracker.log(begun, {})
            tracker.close()
    assert len(controller.told) == 2
    assert ["403" in record.getMessage() for record in caplog.records] == [True]


def test_outside_of_a_trainjob_nobody_is_told():
    tracker = TrainJobStatus(10, environ={})
    assert tracker.begin("run", 3) == 3
    tracker.log(3, {})
    tracker.close()
    with pytest.raises(ValueError, match="total_steps is 0"):
        TrainJobStatus(0)
