"""What collects metrics takes ours: Debian's Prometheus scrapes them, an OpenTelemetry receiver is pushed them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from watching import SECRET, Client, Served, story, told

from phalanx.launch.config._config import LaunchConfig
from phalanx.watch._access import PageAccess, token_of
from phalanx.watch._metrics import families
from phalanx.watch._otel import MetricPusher

ROOT = Path(__file__).parent.parent.parent
HOW = "no {0} on this machine: apt install prometheus"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout:g} s"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(not shutil.which("promtool"), reason=HOW.format("promtool"))
def test_promtool_finds_no_fault_with_the_metrics() -> None:
    served = Served(PageAccess())
    body = served.client.ask("/metrics")[2]
    served.close()
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(not shutil.which("prometheus"), reason=HOW.format("prometheus"))
def test_prometheus_scrapes_a_job_and_answers_what_the_dashboard_asks(tmp_path: Path) -> None:
    served = Served(PageAccess(host="0.0.0.0", secret=SECRET))
    [text] = [
        block.partition("```")[0]
        for block in (ROOT / "docs" / "watch-metrics.md").read_text().split("```yaml\n")
        if block.startswith("scrape_configs")
    ]
    config = text.replace("10.0.0.1:8080", f"127.0.0.1:{served.server.port}").replace("TOKEN", token_of(SECRET))
    (tmp_path / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{config}")
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    prometheus = Client(f"http://127.0.0.1:{port}/")

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return prometheus.ask("/-/ready")[0] == 200
        except OSError:
            return False

    def query(expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = prometheus.json(f"/api/v1/query?query={quote(expression)}")["data"]["result"]
        return found

    def value(expression: str) -> float:
        [one] = query(expression)
        return float(one["value"][1])

    try:
        wait_until(is_ready, "Prometheus' start")
        wait_until(lambda: query("phalanx_step"), "the first scrape")
        assert value("up") == 1
        assert value('phalanx_step{job="j"}') == 4, "honor_labels: the label is the job's, not the scrape's"
        assert value("sum(phalanx_failures_total)") == 1
        by_name = {one["metric"]["collective"]: one["value"][1] for one in query("phalanx_collective_bytes_total")}
        assert by_name == {"all_to_all": "200", "all_gather_into_tensor": "100"}
        assert value("histogram_quantile(0.5, phalanx_step_seconds_bucket)") == pytest.approx(0.75)
        dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$job", "j")
                found = query(expression)  # which fails for one that Prometheus cannot parse
                if "rate(" not in expression and "increase(" not in expression:  # which need two scrapes of a change
                    assert found, expression
    finally:
        process.terminate()
        process.wait(30)
        served.close()


class Receiver:
    """Takes what is pushed to ``/v1/metrics``."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/metrics"
                receiver.got.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def newest(self) -> dict[str, Any]:
        [resource] = self.got[-1].resource_metrics
        [scope] = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}


def labels(point: Any) -> dict[str, str]:
    return {one.key: one.value.string_value or str(one.value.int_value) for one in point.attributes}


def test_the_collector_gets_what_a_scrape_would() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'phalanx-train[otel]'")
    view = told(story()).view
    receiver = Receiver()
    pusher = MetricPusher(receiver.url)
    try:
        assert pusher.send(pusher.made(view, 110.0))
    finally:
        pusher.close()
        receiver.close()
    got = receiver.newest()
    expected = [family for family in families(view, 110.0) if family.samples or family.histogram]
    assert list(got) == [family.name for family in expected]
    for family in expected:
        metric = got[family.name]
        kind = metric.WhichOneof("data")
        assert kind == {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}[family.kind]
        points = getattr(metric, kind).data_points
        if family.histogram is None:
            sent = [(labels(point), point.as_double or float(point.as_int)) for point in points]
            said = [({k: str(v) for k, v in each.items()}, pytest.approx(value)) for each, value in family.samples]
            assert sent == said, family.name
        else:
            [point] = points
            assert (point.count, point.sum) == (family.histogram.num, pytest.approx(family.histogram.total))
            assert tuple(point.bucket_counts) == family.histogram.counts
            assert tuple(point.explicit_bounds) == family.histogram.bounds
    assert got["phalanx_step_seconds"].unit == "s"
    assert got["phalanx_failures_total"].sum.is_monotonic


def test_a_job_pushes_its_last_metrics_at_its_end(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'phalanx-train[otel]'")
    receiver = Receiver()
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "run", "--standalone", "--rdzv-id=pushed", f"--otel={receiver.url}",
             "--start-method=exec", str(script)],
            capture_output=True, text=True, timeout=120, env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
    finally:
        receiver.close()
    assert done.returncode == 0, done.stderr
    [workers] = receiver.newest()["phalanx_workers_wanted"].gauge.data_points
    assert (labels(workers), workers.as_int) == ({"job": "pushed"}, 1)


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    with pytest.raises(RuntimeError, match=r"pip install 'phalanx-train\[otel\]'"):
        MetricPusher("http://127.0.0.1:4318")
    with pytest.raises(ValueError, match="otel is 'collector:4318'; expected the address of a collector"):
        LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, otel="collector:4318")
