"""Pushes the metrics of a job to an OpenTelemetry collector, by OTLP over HTTP: what ``/metrics`` has, by its names.

Needs the extra ``otel`` (``pip install phalanx-train[otel]``), which is imported when the first push is made. Counters
and histograms are cumulative from the job's first event on. A collector that cannot be reached is said
once; the next push has everything.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from phalanx.watch._metrics import MetricFamily, families
from phalanx.watch._view import JobView

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a push may take."""
EXPORTER = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
SDK = "opentelemetry.sdk"
UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}


class MetricPusher:
    """Sends to one collector. ``RuntimeError`` says how to install what is missing."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._export = import_module(f"{SDK}.metrics.export")
            self._resources = import_module(f"{SDK}.resources")
            self._scope = import_module(f"{SDK}.util.instrumentation").InstrumentationScope("phalanx")
            exporter = import_module(EXPORTER).OTLPMetricExporter
        except ImportError as error:
            raise RuntimeError(
                f"metrics cannot be pushed to {url} ({error}): pip install 'phalanx-train[otel]'"
            ) from error
        logging.getLogger(EXPORTER).setLevel(logging.CRITICAL)  # it would say the same at each attempt
        self._is_reached = True
        self._exporter = exporter(endpoint=metrics_endpoint(url), timeout=PATIENCE)

    def made(self, view: JobView, now: float) -> Any:
        """Return what is to be sent of a job: made at once, so that the view may change afterwards."""
        name = self._resources.Resource({"service.name": "phalanx", "service.instance.id": view.job})
        span = (int(view.began * 1e9), int(now * 1e9))
        told = [family for family in families(view, now) if family.samples or family.histogram]
        metrics = [self._metric(family, span) for family in told]
        scopes = [self._export.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")]
        each = [self._export.ResourceMetrics(resource=name, scope_metrics=scopes, schema_url="")]
        return self._export.MetricsData(resource_metrics=each)

    def send(self, made: Any) -> bool:
        """Send it; whether the collector took it."""
        before = self._is_reached
        self._is_reached = self._exporter.export(made) is self._export.MetricExportResult.SUCCESS
        if self._is_reached != before:
            state = "takes metrics again" if self._is_reached else "does not take metrics; it is tried again"
            log.warning("the collector at %s %s", self._url, state)
        return self._is_reached

    def close(self) -> None:
        self._exporter.shutdown()

    def _metric(self, family: MetricFamily, span: tuple[int, int]) -> Any:
        return self._export.Metric(
            name=family.name, description=family.text, unit=unit_of(family.name), data=self._data(family, span)
        )

    def _data(self, family: MetricFamily, span: tuple[int, int]) -> Any:
        export, began, now = self._export, *span
        cumulative = export.AggregationTemporality.CUMULATIVE
        if family.histogram is not None:
            point = export.HistogramDataPoint(
                attributes=family.labels, start_time_unix_nano=began, time_unix_nano=now, count=family.histogram.num,
                sum=family.histogram.total, bucket_counts=family.histogram.counts,
                explicit_bounds=family.histogram.bounds, min=0.0, max=0.0,
            )  # fmt: skip
            return export.Histogram(data_points=[point], aggregation_temporality=cumulative)
        points = [
            export.NumberDataPoint(attributes=labels, start_time_unix_nano=began, time_unix_nano=now, value=value)
            for labels, value in family.samples
        ]
        if family.kind == "gauge":
            return export.Gauge(data_points=points)
        return export.Sum(data_points=points, aggregation_temporality=cumulative, is_monotonic=True)


def metrics_endpoint(url: str) -> str:
    """Return where metrics go: a collector's address without a path gets the usual one.

    >>> metrics_endpoint("http://collector:4318"), metrics_endpoint("http://x/otlp/v1/metrics")
    ('http://collector:4318/v1/metrics', 'http://x/otlp/v1/metrics')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"otel is {url!r}; expected the address of a collector, such as http://127.0.0.1:4318")
    return urlunsplit(parts._replace(path="/v1/metrics")) if parts.path in ("", "/") else url


def unit_of(name: str) -> str:
    """
    >>> unit_of("phalanx_step_seconds"), unit_of("phalanx_state_sent_bytes_total"), unit_of("phalanx_step")
    ('s', 'By', '')
    """
    plain = name.removesuffix("_total")
    return next((unit for end, unit in UNITS.items() if plain.endswith(end)), "")
