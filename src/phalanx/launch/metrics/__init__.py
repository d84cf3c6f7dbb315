"""Sends counters and timers of a job to nowhere, the console, a file of JSON lines, or a Prometheus endpoint.

Owns the handlers and the small vocabulary around them (``put_metric``, ``count``, ``timer``, ``prof``). A
``Metrics`` object holds the handlers of its groups; the module-level functions use the one of the process, as
torch's users know it. Emitting never fails a job. The Prometheus endpoint listens on loopback unless told
otherwise.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from phalanx.watch._http import HttpRequest, HttpResponse, HttpServer
from phalanx.watch._prometheus import CONTENT_TYPE

log = logging.getLogger(__name__)

OWN_GROUP = "phalanx"
"""The group of what an agent counts for itself, in the handler of its ``metrics_cfg``."""
TORCH_GROUP = "torchelastic"
"""The group that the functions of this module use, as torch's do, and in which an agent counts under torch's names."""

P = ParamSpec("P")
R = TypeVar("R")


class MetricData(NamedTuple):
    """Holds one measurement. ``kind`` is ``gauge``, ``counter`` (the value is an increment) or ``timer``
    (milliseconds)."""

    timestamp: float
    group_name: str
    name: str
    value: float
    kind: str = "gauge"


@dataclass(frozen=True)
class MetricsConfig:
    """Says where metrics go: ``{"type": "null" | "console" | "jsonl" | "prometheus", "path": ..., "port": ...,
    "host": ...}``."""

    params: Mapping[str, str] = field(default_factory=dict)


class MetricHandler(ABC):
    """Takes measurements."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...

    def exposition(self) -> str:
        """Return the latest values in Prometheus' text format, for an agent's own page. By default there are none."""
        return ""

    def close(self) -> None:  # noqa: B027  not abstract: most handlers hold nothing
        """Give up files and ports. By default there are none."""


class NullMetricHandler(MetricHandler):
    """Drops everything."""

    def emit(self, metric_data: MetricData) -> None:
        return None


class ConsoleMetricHandler(MetricHandler):
    """Writes one readable line each, to standard error."""

    def emit(self, metric_data: MetricData) -> None:
        stamp = f"{metric_data.timestamp:.3f}"
        print(f"[{stamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}", file=sys.stderr)


class JsonLinesMetricHandler(MetricHandler):
    """Appends one JSON object per measurement to a file."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed by close()

    def emit(self, metric_data: MetricData) -> None:
        self._file.write(json.dumps({"v": 1, **metric_data._asdict()}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # the disk does not take the last lines
            log.warning("metrics are incomplete: %s", error)


class PrometheusMetricHandler(MetricHandler):
    """Serves the latest values as Prometheus text; port 0 takes a free one, see ``port``."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        try:
            import prometheus_client  # optional package
        except ImportError as error:
            raise ValueError("the prometheus metrics handler needs the package prometheus-client") from error
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._server = HttpServer(self._answer, host, port)
        self._server.start()
        self.port = self._server.port
        self._collectors: dict[str, Any] = {}

    def _answer(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=self.exposition().encode(), kind=CONTENT_TYPE)

    def exposition(self) -> str:
        text: str = self._client.generate_latest(self._registry).decode()
        return text

    def emit(self, metric_data: MetricData) -> None:
        name = re.sub(r"\W", "_", f"{metric_data.group_name}_{metric_data.name}")
        collector = self._collectors.get(name)
        if collector is None:
            kinds: dict[str, Any] = {"counter": self._client.Counter, "timer": self._client.Summary}
            make = kinds.get(metric_data.kind, self._client.Gauge)
            collector = make(name, f"{metric_data.name} of {metric_data.group_name}", registry=self._registry)
            self._collectors[name] = collector
        if metric_data.kind == "counter":
            collector.inc(metric_data.value)
        elif metric_data.kind == "timer":
            collector.observe(metric_data.value)
        else:
            collector.set(metric_data.value)

    def close(self) -> None:
        self._server.stop()


def make_handler(config: MetricsConfig | Mapping[str, str]) -> MetricHandler:
    """Return the handler that a configuration stands for; ``ValueError`` says what is wrong with it."""
    params = config.params if isinstance(config, MetricsConfig) else config
    kind = params.get("type", "null")
    if kind == "null":
        return NullMetricHandler()
    if kind == "console":
        return ConsoleMetricHandler()
    if kind == "jsonl":
        if "path" not in params:
            raise ValueError("metrics of type 'jsonl' need a path")
        return JsonLinesMetricHandler(params["path"])
    if kind == "prometheus":
        port = str(params.get("port", "0"))
        if not port.isdecimal():
            raise ValueError(f"metrics port {port!r}; expected a number")
        return PrometheusMetricHandler(int(port), params.get("host", "127.0.0.1"))
    raise ValueError(f"metrics of type {kind!r}; expected null, console, jsonl or prometheus")


class MetricStream:
    """Takes the measurements of one group."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Emit a value; what the handler raises is raised."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


class Metrics:
    """Holds handlers by group; a group without its own uses the default.

    >>> metrics = Metrics()
    >>> with metrics.timer("rendezvous"):
    ...     pass
    """

    def __init__(self, handler: MetricHandler | None = None) -> None:
        self._default = handler or NullMetricHandler()
        self._by_group: dict[str, MetricHandler] = {}
        self._lock = threading.Lock()
        self._failed = False

    def configure(self, handler: MetricHandler, group: str | None = None) -> None:
        """Set the handler of a group, or the default."""
        with self._lock:
            if group is None:
                self._default = handler
            else:
                self._by_group[group] = handler

    def handler_of(self, group: str) -> MetricHandler:
        """Return the handler that a group has now."""
        return self._by_group.get(group, self._default)

    def put(self, name: str, value: float, group: str = OWN_GROUP, kind: str = "gauge") -> None:
        """Emit one measurement; a handler that fails is logged once and does no harm."""
        with self._lock:
            handler = self.handler_of(group)
            try:
                handler.emit(MetricData(time.time(), group, name, value, kind))
            except Exception as error:
                if not self._failed:
                    log.warning("metrics handler %s failed: %r", type(handler).__name__, error)
                self._failed = True

    def count(self, name: str, amount: float = 1, group: str = OWN_GROUP) -> None:
        self.put(name, amount, group, "counter")

    @contextmanager
    def timer(self, name: str, group: str = OWN_GROUP) -> Iterator[None]:
        """Measure a block; what raises is counted apart, as ``<name>.failure``."""
        started = time.perf_counter()
        outcome = "failure"
        try:
            yield
            outcome = "success"
        finally:
            self.count(f"{name}.{outcome}", 1, group)
            self.put(f"{name}.duration.ms", (time.perf_counter() - started) * 1e3, group, "timer")

    def close(self) -> None:
        with self._lock:
            for handler in (self._default, *self._by_group.values()):
                handler.close()


_process = Metrics()
"""The metrics of this process: what torch's module-level functions act on has to live somewhere."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the process's handler for a group, or the default."""
    _process.configure(handler, group)


def initialize_metrics(cfg: MetricsConfig | Mapping[str, str] | None = None) -> MetricHandler:
    """Make the handler of a configuration the process's default, and return it (close it at the end)."""
    handler = make_handler(MetricsConfig() if cfg is None else cfg)
    configure(handler)
    return handler


def getStream(group: str) -> MetricStream:
    """Return the stream of a group."""
    return MetricStream(group, _process.handler_of(group))


def put_metric(metric_name: str, metric_value: float, metric_group: str = TORCH_GROUP) -> None:
    """Emit a value."""
    _process.put(metric_name, metric_value, metric_group)


def count(metric_name: str, amount: float = 1, metric_group: str = TORCH_GROUP) -> None:
    """Add to a counter."""
    _process.count(metric_name, amount, metric_group)


@overload
def prof(fn: Callable[P, R], group: str = ...) -> Callable[P, R]: ...
@overload
def prof(fn: None = None, group: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prof(
    fn: Callable[P, R] | None = None, group: str = TORCH_GROUP
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Count and time every call of a function, as ``@prof`` or ``@prof(group=...)``."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with _process.timer(name, group):
                return function(*args, **kwargs)

        name = _metric_name(function)
        return wrapper

    return wrap if fn is None else wrap(fn)


def _metric_name(function: Callable[..., Any]) -> str:
    """Return class and method, or module and function."""
    name = function.__qualname__
    return name if "." in name else f"{function.__module__.rpartition('.')[2]}.{name}"


def profile(group: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Count and time every call of a function under its bare name; ``prof`` is the newer way."""
    warnings.warn("metrics.profile is deprecated: use prof", FutureWarning, stacklevel=2)

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with _process.timer(function.__name__, group):
                return function(*args, **kwargs)

        return wrapper

    return wrap


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Emit a value; ``put_metric`` is the newer way."""
    warnings.warn("metrics.publish_metric is deprecated: use put_metric", FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the milliseconds since a moment of ``time.time()``."""
    return int((time.time() - start_time_in_seconds) * 1000)
