"""Names what can be counted and measured of a job, from its events: base units, one meaning for each name. Pure.

Labels: ``job`` everywhere, ``node``, ``rank``, ``generation`` or ``cause`` where there is one for each. How they are
written is the business of ``_prometheus`` and ``_otel``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.watch._histogram import Histogram
from phalanx.watch._view import JobView

Labels = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """All values of one name: ``samples``, or a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    samples: Sequence[tuple[Labels, float]] = ()
    histogram: Histogram | None = None
    labels: Labels = field(default_factory=dict)
    """Of the histogram."""


def families(view: JobView, now: float) -> list[MetricFamily]:
    """Return all metrics of a job."""
    return list(_families(view, now))


def _families(view: JobView, now: float) -> Iterable[MetricFamily]:
    job: Labels = {"job": view.job}
    summary = view.summary(now)
    yield from _gauges(view, summary, job)
    yield from _goodput(summary["goodput"], job)
    counts = view.counts
    yield from _metric(
        "phalanx_failures_total",
        "counter",
        "Workers that failed, by node and cause.",
        [
            ({**job, "node": node, "cause": cause}, number)
            for (node, cause), number in sorted(view.machines.failures.items())
        ],
    )
    for name, text, number in (
        (
            "phalanx_restarts_total",
            "Workers that were replaced by new ones, and times that all of them were started anew.",
            sum(view.machines.restarts.values()) + view.num_restarts,
        ),
        ("phalanx_regroups_total", "Rounds that were formed.", max(0, view.lifelines.num_rounds - 1)),
        (
            "phalanx_steps_committed_total",
            "Steps that were committed, each as often as it was.",
            counts["events"]["step"],
        ),
        ("phalanx_saves_total", "Saves that were written.", counts["events"]["saved"]),
        ("phalanx_saves_verified_total", "Saves that were read back when written.", view.num_verified),
        (
            "phalanx_save_failures_total",
            "Attempts to save that the disk did not take.",
            counts["events"]["save_failed"],
        ),
        ("phalanx_hangs_total", "Workers that were killed because they hung.", counts["events"]["worker_hung"]),
        (
            "phalanx_setbacks_total",
            "Times that all workers were lost and steps repeated.",
            counts["events"]["job_went_back"],
        ),
        ("phalanx_state_sent_bytes_total", "Bytes of state that were sent to newcomers.", view.state_bytes),
    ):
        yield from _metric(name, "counter", text, [(job, number)])
    yield from _metric(
        "phalanx_generations_total",
        "counter",
        "Generations that ended, by how.",
        [({**job, "how": how}, number) for how, number in sorted(counts["generations"].items())],
    )
    yield from _metric(
        "phalanx_collective_bytes_total",
        "counter",
        "Bytes that collectives moved on all workers, by collective.",
        [({**job, "collective": name}, number) for name, number in sorted(view.collective_bytes.items())],
    )
    yield from _histogram("phalanx_step_seconds", "Time of a step on a worker.", view.step_times, job)
    yield from _histogram("phalanx_regroup_seconds", "Time of a regroup on a worker.", view.regroup_times, job)
    yield from _nodes(view, job)


def _gauges(view: JobView, summary: dict[str, Any], job: Labels) -> Iterable[MetricFamily]:
    for name, text, value in (
        ("phalanx_step", "Steps that are committed.", summary["step"]),
        ("phalanx_steps_wanted", "Steps at which the job will be done.", summary["total_steps"]),
        ("phalanx_loss", "Loss of the last committed step.", summary["loss"]),
        ("phalanx_samples_per_second", "Samples per second, lately.", summary["samples_per_second"]),
        ("phalanx_workers", "Workers that compute.", summary["workers"]),
        ("phalanx_workers_wanted", "Workers that the job would have with all its nodes.", summary["wanted"]),
        ("phalanx_generation", "Number of the current generation.", summary["generation"]),
        ("phalanx_last_event_timestamp_seconds", "When the last event was told.", summary["latest"]),
    ):
        yield from _metric(name, "gauge", text, [] if value is None else [(job, value)])
    members = view.lifelines.members
    lives = [life for worker in members if (life := view.lifelines.lives.get(worker)) is not None]
    yield from _metric(
        "phalanx_worker_slots",
        "gauge",
        "Slots that a worker carries.",
        [
            ({**job, "node": life.host, "rank": life.rank, "generation": view.generation}, life.slots[-1][2])
            for life in lives
            if life.slots
        ],
    )
    paces = view.paces.rows(members)
    rows = [(life, paces[life.worker]) for life in lives if life.worker in paces]
    for name, text, key in (
        ("phalanx_worker_step_seconds", "What a worker spends on a step, lately, by part.", "seconds"),
        ("phalanx_worker_step_relative", "The same, as a multiple of the workers' median.", "relative"),
    ):
        samples: list[tuple[Labels, float]] = [
            ({**job, "node": life.host, "rank": life.rank, "generation": view.generation, "part": part}, number)
            for life, row in rows
            for part, number in row[key].items()
            if number is not None
        ]
        yield from _metric(name, "gauge", text, samples)


def _goodput(account: dict[str, Any], job: Labels) -> Iterable[MetricFamily]:
    yield from _metric(
        "phalanx_worker_seconds_total",
        "counter",
        "Worker-seconds by what they were spent on.",
        [({**job, "part": name}, value) for name, value in account["parts"].items()],
    )
    yield from _metric(
        "phalanx_goodput_ratio", "gauge", "Productive worker-seconds of all.", [(job, account["goodput"])]
    )


def _nodes(view: JobView, job: Labels) -> Iterable[MetricFamily]:
    nodes = [node for node in view.nodes() if node["cpu"] is not None]
    for name, text, key in (
        ("phalanx_node_cpu_ratio", "Share of a node's processors that is busy.", "cpu"),
        ("phalanx_node_memory_used_bytes", "Memory in use.", "memory_used"),
        ("phalanx_node_memory_total_bytes", "Memory of a node.", "memory_total"),
        ("phalanx_node_receive_bytes_per_second", "Bytes received per second.", "received"),
        ("phalanx_node_transmit_bytes_per_second", "Bytes sent per second.", "sent"),
    ):
        yield from _metric(name, "gauge", text, [({**job, "node": node["node"]}, node[key]) for node in nodes])


def _metric(
    name: str, kind: Literal["counter", "gauge"], text: str, values: Sequence[tuple[Labels, float]]
) -> Iterable[MetricFamily]:
    yield MetricFamily(name=name, kind=kind, text=text, samples=values)


def _histogram(name: str, text: str, times: Histogram, labels: Labels) -> Iterable[MetricFamily]:
    yield MetricFamily(name=name, kind="histogram", text=text, histogram=times, labels=labels)
