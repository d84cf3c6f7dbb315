"""Metrics reach their handlers and never fail the job."""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.launch import LaunchConfig, events, metrics
from phalanx.launch.agent._node_watch import NodeWatch
from phalanx.launch.agent._observer import Observer
from phalanx.launch.metrics import MetricData, MetricHandler, Metrics, MetricsConfig, make_handler

pytestmark = pytest.mark.fast


class Collect(MetricHandler):
    def __init__(self) -> None:
        self.seen: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.seen.append(metric_data)


@pytest.fixture
def process() -> Iterator[Collect]:
    collect = Collect()
    metrics.configure(collect)
    yield collect
    metrics.configure(metrics.NullMetricHandler())


def test_values_counts_and_streams(process: Collect) -> None:
    metrics.put_metric("a", 3)
    metrics.count("b", 2, "group")
    metrics.getStream("other").add_value("c", 1)
    assert [(d.group_name, d.name, d.value, d.kind) for d in process.seen] == [
        ("torchelastic", "a", 3, "gauge"),
        ("group", "b", 2, "counter"),
        ("other", "c", 1, "gauge"),
    ]


def test_prof_counts_and_times_successes_and_failures(process: Collect) -> None:
    @metrics.prof
    def works(x: int) -> int:
        return x + 1

    @metrics.prof(group="g")
    def breaks() -> None:
        raise KeyError("x")

    assert works(1) == 2
    with pytest.raises(KeyError):
        breaks()
    names = [(d.group_name, d.name.rpartition("<locals>.")[2]) for d in process.seen]
    assert names == [
        ("torchelastic", "works.success"),
        ("torchelastic", "works.duration.ms"),
        ("g", "breaks.failure"),
        ("g", "breaks.duration.ms"),
    ]


def test_the_deprecated_names_still_count(process: Collect) -> None:
    with pytest.warns(FutureWarning, match="use put_metric"):
        metrics.publish_metric("g", "a", 1)
    with pytest.warns(FutureWarning, match="use prof"):

        @metrics.profile("g")
        def works() -> int:
            return 1

    assert works() == 1
    names = [(d.group_name, d.name) for d in process.seen]
    assert names == [("g", "a"), ("g", "works.success"), ("g", "works.duration.ms")]


def test_a_group_can_have_its_own_handler() -> None:
    default, special = Collect(), Collect()
    m = Metrics(default)
    m.configure(special, "s")
    m.put("x", 1)
    m.put("y", 2, "s")
    assert [d.name for d in default.seen] == ["x"]
    assert [d.name for d in special.seen] == ["y"]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "metrics.jsonl"
    m = Metrics(make_handler(MetricsConfig({"type": "jsonl", "path": str(path)})))
    m.count("restarts")
    m.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["name"] == "restarts"


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    Metrics(make_handler({"type": "console"})).put("x", 5)
    assert "[phalanx]: x=5" in capsys.readouterr().err


def test_prometheus_serves_text_on_loopback() -> None:
    handler = metrics.PrometheusMetricHandler()
    m = Metrics(handler)
    try:
        m.count("worker.restarts", 2)
        m.put("nodes", 3)
        with m.timer("rendezvous"):
            pass
        url = f"http://127.0.0.1:{handler.port}/metrics"
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(url, timeout=90) as answer:
            text = answer.read().decode()
    finally:
        m.close()
    assert "phalanx_worker_restarts_total 2.0" in text
    assert "phalanx_nodes 3.0" in text
    assert "phalanx_rendezvous_duration_ms_count 1.0" in text


def test_a_broken_handler_is_logged_once_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            raise OSError("disk full")

    m = Metrics(Broken())
    with caplog.at_level(logging.WARNING):
        m.put("x", 1)
        m.put("x", 1)
    said = [record.getMessage() for record in caplog.records if record.name == metrics.__name__]
    assert said == ["metrics handler Broken failed: OSError('disk full')"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"type": "graphite"}, "expected null, console"),
        ({"type": "jsonl"}, "need a path"),
        ({"type": "prometheus", "port": "x"}, "expected a number"),
    ],
)
def test_wrong_configurations_are_refused(params: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_handler(params)
    metrics.initialize_metrics()


def test_what_prometheus_reads_is_on_the_page_of_the_agent_too() -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", run_id="j", metrics_cfg={"type": "prometheus"}
    )
    watch = NodeWatch(config, None, None)  # type: ignore[arg-type]  # no rendezvous is asked for anything
    observer = Observer.create(config, None, watch)
    try:
        observer.write(events.GenerationFormed(job="j", generation=3, num_nodes=1, num_workers=2))
        found = {family.name: family.samples[0].value for family in text_string_to_metric_families(watch.metrics())}
        assert [value for name, value in found.items() if name.endswith("_generation")] == [3]
    finally:
        observer.close()
    assert NodeWatch(config, None, None).metrics() == ""  # type: ignore[arg-type]


def test_a_page_that_others_can_reach_has_a_token_that_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", run_id="j", dashboard="0.0.0.0:0"
    )
    watch = NodeWatch(config, SimpleNamespace(secret_file=""), None)  # type: ignore[arg-type]  # all that is asked of it
    watch.start(str(tmp_path))
    try:
        said = capsys.readouterr()
        (token,) = re.findall(r"token=(\S+)", said.out + said.err)
        port = urlsplit(watch.url).port
        assert token not in watch.url, "what stands in the store"

        def ask(**headers: str) -> int:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/summary", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert ask() == 401
        assert ask(Authorization=f"Bearer {token}") == 200
    finally:
        watch.stop()
    said = capsys.readouterr()
    assert "token" not in said.out + said.err
